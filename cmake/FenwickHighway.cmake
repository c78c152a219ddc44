# Google Highway as one target, fenwick_hwy. Debian installs hwy::hwy, upstream releases HWY::HWY;
# FENWICK_HWY_ROOT names an unpacked package (the usr/ of `dpkg -x libhwy-dev...`) on machines
# where nothing can be installed.
add_library(fenwick_hwy INTERFACE)
if(FENWICK_HWY_ROOT)
  find_library(FENWICK_HWY_LIBRARY NAMES hwy libhwy.so.1 PATHS ${FENWICK_HWY_ROOT} REQUIRED NO_DEFAULT_PATH
    PATH_SUFFIXES lib lib/x86_64-linux-gnu)
  target_include_directories(fenwick_hwy INTERFACE $<BUILD_INTERFACE:${FENWICK_HWY_ROOT}/include>)
  target_link_libraries(fenwick_hwy INTERFACE ${FENWICK_HWY_LIBRARY})
else()
  find_package(HWY REQUIRED)
  if(TARGET HWY::HWY)
    target_link_libraries(fenwick_hwy INTERFACE HWY::HWY)
  else()
    target_link_libraries(fenwick_hwy INTERFACE hwy::hwy)
  endif()
endif()
