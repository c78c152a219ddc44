# Finds the torch of the interpreter in Python3_EXECUTABLE (or python3), CPU or CUDA build.
# `python -I` looks past pip's build isolation at the environment that will use the wheel.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(NOT Torch_DIR)
  execute_process(COMMAND ${Python3_EXECUTABLE} -I -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE FENWICK_TORCH_PREFIX OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _result
    ERROR_QUIET)
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "no torch in ${Python3_EXECUTABLE}; run `make setup`, or configure with "
      "-DPython3_EXECUTABLE=... or -DFENWICK_TORCH=OFF")
  endif()
  list(APPEND CMAKE_PREFIX_PATH ${FENWICK_TORCH_PREFIX})
endif()
find_package(Torch REQUIRED)
