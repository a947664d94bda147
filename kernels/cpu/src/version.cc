// Which version of XLA's foreign functions this library was compiled for: an XLA that is older
// refuses it, and would refuse to start at all.

#include "xla/ffi/api/c_api.h"

extern "C" int jaxserve_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jaxserve_ffi_minor() { return XLA_FFI_API_MINOR; }
