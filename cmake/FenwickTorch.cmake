# Finds the torch of the interpreter in Python3_EXECUTABLE (or python3), CPU or CUDA build.
# `python -I` looks past pip's build isolation at the environment that will use the wheel.
#
# The program and the tests need LibTorch, as torch's own CMake package describes it. The operators
# alone (a wheel) need the headers of the stable ABI and three libraries: the package would also ask
# for the CUDA toolkit where torch has CUDA, even when no kernel is to be compiled.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
function(fenwick_ask_torch variable expression)
  execute_process(COMMAND ${Python3_EXECUTABLE} -I -W ignore -c "import torch; print(${expression})"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE result ERROR_QUIET)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "no torch in ${Python3_EXECUTABLE}; run `make setup`, or configure with "
      "-DPython3_EXECUTABLE=... or -DFENWICK_TORCH=OFF")
  endif()
  set(${variable} ${answer} PARENT_SCOPE)
endfunction()

if(FENWICK_PROGRAM OR FENWICK_TESTS)
  if(NOT Torch_DIR)
    fenwick_ask_torch(_prefix "torch.utils.cmake_prefix_path")
    list(APPEND CMAKE_PREFIX_PATH ${_prefix})
  endif()
  find_package(Torch REQUIRED)
else()
  fenwick_ask_torch(_torch "torch.__path__[0]")
  set(TORCH_INCLUDE_DIRS ${_torch}/include ${_torch}/include/torch/csrc/api/include)
  set(TORCH_LIBRARIES ${_torch}/lib/libtorch.so ${_torch}/lib/libtorch_cpu.so ${_torch}/lib/libc10.so)
  if(FENWICK_CUDA AND EXISTS ${_torch}/lib/libtorch_cuda.so)  # it has the current stream
    list(APPEND TORCH_LIBRARIES ${_torch}/lib/libtorch_cuda.so)
  endif()
endif()
