# Warnings and sanitizers for every target of the project: link fenwick_flags privately.
add_library(fenwick_flags INTERFACE)
target_compile_options(fenwick_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-sign-compare -Wno-unused-parameter
  -Wno-missing-field-initializers>)
if(FENWICK_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=address,undefined)
endif()
