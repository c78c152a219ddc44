# A wheel has the CUDA kernels where the installed torch has CUDA and there is a compiler for them.
# -DFENWICK_CUDA=... (pip: --config-settings=cmake.define.FENWICK_CUDA=OFF) decides otherwise.
include(FenwickTorch)
fenwick_ask_torch(_torch_cuda "torch.version.cuda or ''")
if(_torch_cuda)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(FENWICK_CUDA ON)
  else()
    message(WARNING "torch has CUDA ${_torch_cuda}, but no nvcc was found (CUDACXX names one): the "
      "wheel will have kernels for the CPU only")
  endif()
endif()
