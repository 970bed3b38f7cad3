// Vectors of the processor's own width, and what the kernels of this folder do with them.

#pragma once

#include <algorithm>
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

// e^x for x <= 0, by the polynomial of Cephes; 0 for what is below e^-87.
inline Vec exp_of(Vec x) {
    const Vec bounded = select(x > -87.0f, x, splat(-87.0f));
    const Vec shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum is rounded to a whole number
    const Ints power = (Ints)shifted - 0x4b400000;
    const Vec whole = shifted - 12582912.0f;
    const Vec rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vec sum = splat(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return select(x > -87.0f, (Vec)((Ints)sum + (power << 23)), Vec{});
}

// By the polynomial of Cephes near 0.
inline Vec tanh_of(Vec x) {
    const Vec size = select(x < 0.0f, -x, x), square = x * x;
    Vec sum = splat(-5.70498872745e-3f);
    sum = sum * square + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    const Vec small = sum * square * x + x;
    const Vec decay = exp_of(-2.0f * size), large = (1.0f - decay) / (1.0f + decay);
    return select(size < 0.625f, small, select(x < 0.0f, -large, large));
}

inline float sum_of(Vec x) {
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; ++lane) x[lane] += x[lane + width];
    return x[0];
}

inline float max_of(Vec x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; ++lane) most = std::max(most, x[lane]);
    return most;
}

// The sum of vectors, neighbours first: the order in which all scores are summed.
template <int COUNT>
inline Vec add_all(const Vec* x) {
    if constexpr (COUNT == 1) return x[0];
    else return add_all<COUNT / 2>(x) + add_all<COUNT / 2>(x + COUNT / 2);
}

// The sum over the lanes of each of COUNT vectors, of all LANES in the lanes of one; the order is that of `add_all`.
template <int COUNT>
inline Vec sums_of(const Vec* x) {
    if constexpr (COUNT == 1) return x[0];
    else {
        Vec even, odd;
        pair_up<COUNT / 2>(sums_of<COUNT / 2>(x), sums_of<COUNT / 2>(x + COUNT / 2), even, odd);
        return even + odd;
    }
}

}  // namespace
