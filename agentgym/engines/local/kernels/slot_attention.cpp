// The operator of slot_attention.py, compiled for the machine.

#include "slot_attention.h"

extern "C" void attend_float32(const Sizes* sizes, const float* queries, const float* keys, const float* values,
                               float* stored, const int64_t* slots, const int64_t* positions, const int64_t* firsts,
                               const int64_t* roots, const int64_t* commons, const float* sinks, float* out,
                               int64_t num_threads) {
    attend<float>({*sizes, queries, keys, values, stored, slots, positions, firsts, roots, commons, sinks, out},
                  num_threads);
}

extern "C" void attend_bfloat16(const Sizes* sizes, const uint16_t* queries, const uint16_t* keys,
                                const uint16_t* values, uint16_t* stored, const int64_t* slots,
                                const int64_t* positions, const int64_t* firsts, const int64_t* roots,
                                const int64_t* commons, const uint16_t* sinks, uint16_t* out, int64_t num_threads) {
    attend<uint16_t>({*sizes, queries, keys, values, stored, slots, positions, firsts, roots, commons, sinks, out},
                     num_threads);
}
