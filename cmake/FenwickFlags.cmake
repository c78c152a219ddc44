# Warnings and sanitizers for every target of the project: link fenwick_flags privately.
add_library(fenwick_flags INTERFACE)
target_compile_options(fenwick_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-sign-compare -Wno-unused-parameter
  -Wno-missing-field-initializers>)
if(FENWICK_SANITIZE)
  # One instruction set and -O1: instrumented Highway kernels for every target at -O3 take hours.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
    $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  add_link_options(-fsanitize=address,undefined)
  add_compile_definitions(HWY_COMPILE_ONLY_STATIC)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v3> $<$<COMPILE_LANGUAGE:CXX>:-maes>
      $<$<COMPILE_LANGUAGE:CXX>:-mpclmul>)  # what Highway asks of its AVX2 target
  endif()
endif()
