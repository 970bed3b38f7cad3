// The products of row_products.py, compiled for the machine.

#include "row_products.h"

extern "C" int64_t panel_width() { return WIDE; }

extern "C" void pack_float32(const float* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                             int64_t inner_stride, Unit* packed) {
    pack<float>({weight, outer, inner, outer_stride, inner_stride}, packed);
}

extern "C" void multiply_float32(const float* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                                 int64_t inner_stride, const Unit* packed, const float* x, int64_t num_rows,
                                 const float* added, float* out, int64_t num_threads) {
    multiply(x, num_rows, {weight, outer, inner, outer_stride, inner_stride}, packed, added, out, num_threads);
}

extern "C" void pack_bfloat16(const uint16_t* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                              int64_t inner_stride, Unit* packed) {
    pack<uint16_t>({weight, outer, inner, outer_stride, inner_stride}, packed);
}

extern "C" void multiply_bfloat16(const uint16_t* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                                  int64_t inner_stride, const Unit* packed, const uint16_t* x, int64_t num_rows,
                                  const uint16_t* added, uint16_t* out, int64_t num_threads) {
    multiply(x, num_rows, {weight, outer, inner, outer_stride, inner_stride}, packed, added, out, num_threads);
}
