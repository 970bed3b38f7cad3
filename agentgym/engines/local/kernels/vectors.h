// Vectors of the processor's own width, and what the kernels of this folder do with them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

namespace {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline float widen(float x) { return x; }

inline float widen(uint16_t x) {  // bfloat16
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline void narrow(float x, float* to) { *to = x; }

inline void narrow(float x, uint16_t* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline Vec load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Vec load(const uint16_t* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Vec)(__builtin_convertvector(halves, Ints) << 16);
}

// Asks for memory that is read soon; it need not exist.
template <typename T>
inline void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Keeps the compiler from reading it from memory at each use.
inline Vec in_register(Vec x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
    return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

inline Vec splat(float x) { return Vec{} + x; }

inline Vec select(Ints where, Vec yes, Vec no) { return where ? yes : no; }

// Pairs neighbours: lanes with the bit STRIDE are of `b`, the others of `a`; `even` holds the lower one of each pair of
// lanes and `odd` the higher one.
template <int STRIDE>
inline void pair_up(Vec a, Vec b, Vec& even, Vec& odd) {
#ifdef __clang__
    for (int lane = 0; lane < LANES; ++lane) {
        even[lane] = lane & STRIDE ? b[lane & ~STRIDE] : a[lane];
        odd[lane] = lane & STRIDE ? b[lane] : a[lane | STRIDE];
    }
#else
    Ints lower, higher;
    for (int lane = 0; lane < LANES; ++lane) {
        const int of_b = lane & STRIDE ? LANES : 0;
        lower[lane] = of_b + (lane & ~STRIDE);
        higher[lane] = of_b + (lane | STRIDE);
    }
    even = __builtin_shuffle(a, b, lower);
    odd = __builtin_shuffle(a, b, higher);
#endif
}

template <int STRIDE>
inline void swap_pairs(Vec (&x)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & STRIDE)) {
            Vec even, odd;
            pair_up<STRIDE>(x[i], x[i + STRIDE], even, odd);
            x[i] = even;
            x[i + STRIDE] = odd;
        }
}

inline void transpose(Vec (&x)[LANES]) {
    swap_pairs<1>(x);
    swap_pairs<2>(x);
    swap_pairs<4>(x);
#if LANES == 16
    swap_pairs<8>(x);
#endif
}

}  // namespace
