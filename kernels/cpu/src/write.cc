// Writes keys and values of tokens to their pages, and whole pages, in place. Called by
// kernels/cpu/write.py.

#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// pool [1, P, K, 2, C, ...], page [T], offset [T], values [T, K, 2, ...] -> the pool, which is the
// same memory. Tokens on pages out of range are skipped.
ffi::Error write_tokens(ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> page,
                        ffi::Buffer<ffi::S32> offset,
                        ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = pool.dimensions();
  const int64_t P = shape[1], vectors = shape[2] * shape[3], C = shape[4];
  const int64_t tokens = page.element_count();
  if (pool.untyped_data() != out->untyped_data())
    return ffi::Error::InvalidArgument("write: the pool was not given to be written in place");
  if (tokens == 0) return ffi::Error::Success();
  const int64_t bytes = values.size_bytes() / (tokens * vectors);  // of a vector
  const char* from = (const char*)values.untyped_data();
  char* to = (char*)out->untyped_data();
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t p = page.typed_data()[t], c = offset.typed_data()[t];
    if (p < 0 || p >= P || c < 0 || c >= C) continue;
    for (int64_t v = 0; v < vectors; v++)
      memcpy(to + ((p * vectors + v) * C + c) * bytes, from + (t * vectors + v) * bytes, bytes);
  }
  return ffi::Error::Success();
}

// pool [1, P, ...], ids [n], values [n, ...] -> the pool, which is the same memory. Pages out of range
// are skipped.
ffi::Error write_pages(ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer values,
                       ffi::Result<ffi::AnyBuffer> out) {
  const int64_t P = pool.dimensions()[1], count = ids.element_count();
  if (pool.untyped_data() != out->untyped_data())
    return ffi::Error::InvalidArgument("write: the pool was not given to be written in place");
  if (count == 0 || P == 0) return ffi::Error::Success();
  const int64_t bytes = values.size_bytes() / count;  // of a page
  const char* from = (const char*)values.untyped_data();
  char* to = (char*)out->untyped_data();
  for (int64_t i = 0; i < count; i++) {
    const int64_t p = ids.typed_data()[i];
    if (p >= 0 && p < P) memcpy(to + p * bytes, from + i * bytes, bytes);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write, write_tokens,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write_pages, write_pages,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
