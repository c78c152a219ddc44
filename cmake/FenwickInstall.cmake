# Installs the core library, its headers and the package for find_package(fenwick), as the
# component "core".
include(CMakePackageConfigHelpers)
set(FENWICK_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/fenwick)

set_target_properties(fenwick_hwy PROPERTIES EXPORT_NAME hwy)
install(TARGETS fenwick fenwick_hwy EXPORT fenwickTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT core)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fenwick DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT core)
install(EXPORT fenwickTargets NAMESPACE fenwick:: DESTINATION ${FENWICK_PACKAGE_DIR}
  COMPONENT core)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fenwickConfig.cmake.in
  ${PROJECT_BINARY_DIR}/fenwickConfig.cmake INSTALL_DESTINATION ${FENWICK_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fenwickConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fenwickConfig.cmake
  ${PROJECT_BINARY_DIR}/fenwickConfigVersion.cmake
  DESTINATION ${FENWICK_PACKAGE_DIR} COMPONENT core)
