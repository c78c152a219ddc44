# Installs BUILD_DIR into a fresh prefix, then configures, builds and runs SOURCE_DIR against it.
file(REMOVE_RECURSE ${WORK_DIR})
file(COPY ${SOURCE_DIR}/ DESTINATION ${WORK_DIR}/source)
foreach(command
    "${CMAKE_COMMAND};--install;${BUILD_DIR};--component;core;--prefix;${WORK_DIR}/prefix"
    "${CMAKE_COMMAND};-G;Ninja;-S;${WORK_DIR}/source;-B;${WORK_DIR}/build;-DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix;-DCMAKE_CXX_COMPILER=${CXX}"
    "${CMAKE_COMMAND};--build;${WORK_DIR}/build"
    "${WORK_DIR}/build/consumer")
  execute_process(COMMAND ${command} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${command}")
  endif()
endforeach()
