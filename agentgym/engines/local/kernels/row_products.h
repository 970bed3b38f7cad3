// Products of rows with weights, on a CPU.
//
// A result is the sum over the inner dimension, one term after the other (or one pair of terms after the other, where
// the processor's instruction for bfloat16 adds it), so the bits of a row do not depend on the other rows.
//
// A weight is taken in panels of WIDE outputs, in which the numbers of all outputs for one input are neighbours. Rows
// are taken ROWS at a time, and meanwhile the part of the weight that comes next is fetched from memory. A panel is
// computed in parts of the inner dimension that stay in the processor's cache until all rows have been multiplied.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int PARTS = LANES == 16 ? 4 : 2;  // vectors of a panel
constexpr int64_t WIDE = PARTS * LANES;     // outputs of a panel
constexpr int64_t PART_UNITS = 512;         // of the inner dimension
constexpr int ROWS = 4;
constexpr int LINES = WIDE * 4 / 64;  // cache lines of a panel for one unit

// A unit is what a lane of 32 bits holds: a float, or two bfloat16 numbers.
typedef uint32_t Unit;

template <typename T>
constexpr int64_t PER_UNIT = sizeof(Unit) / sizeof(T);

// The ways to multiply by a unit of the weight: `X` is the type of the rows' numbers, of which it takes `TERMS`.
struct Float32 {
    typedef float X;
    static constexpr int64_t TERMS = 1;
    Vec weight;
    explicit Float32(Vec unit) : weight(unit) {}
    Vec add_products(Vec sum, const float* x) const { return sum + *x * weight; }
};

struct WideBfloat16 {  // as floats, of which the bits of bfloat16 are the upper half
    typedef float X;
    static constexpr int64_t TERMS = 2;
    Vec first, second;
    explicit WideBfloat16(Vec unit) : first((Vec)((Ints)unit << 16)), second((Vec)((Ints)unit & (int32_t)0xffff0000)) {}
    Vec add_products(Vec sum, const float* x) const { return sum + x[0] * first + x[1] * second; }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {  // by the processor's instruction
    typedef uint16_t X;
    static constexpr int64_t TERMS = 2;
    Vec weight;
    explicit Bfloat16(Vec unit) : weight(unit) {}
    Vec add_products(Vec sum, const uint16_t* x) const {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weight);
    }
};
#endif

// A weight [outer, inner] with any strides.
template <typename T>
struct Weight {
    const T* numbers;
    int64_t outer, inner, outer_stride, inner_stride;

    int64_t num_units() const { return inner / PER_UNIT<T>; }

    // Writes a part of a panel; outputs beyond the last are 0.
    void turn(int64_t first, int64_t unit, int64_t num_units, Unit* panel) const {
        const int64_t num = std::min(WIDE, outer - first);
        if (num < WIDE) std::memset(panel, 0, num_units * WIDE * sizeof(Unit));
        if (num == WIDE && inner_stride == 1 && num_units % LANES == 0) {
            for (int64_t out = 0; out < WIDE; out += LANES)
                for (int64_t k = 0; k < num_units; k += LANES) {
                    Vec square[LANES];
                    for (int i = 0; i < LANES; ++i) {
                        const T* from = numbers + (first + out + i) * outer_stride + (unit + k) * PER_UNIT<T>;
                        std::memcpy(&square[i], from, sizeof(Vec));
                    }
                    transpose(square);
                    for (int i = 0; i < LANES; ++i) std::memcpy(panel + (k + i) * WIDE + out, &square[i], sizeof(Vec));
                }
            return;
        }
        T* const target = reinterpret_cast<T*>(panel);
        for (int64_t out = 0; out < num; ++out)
            for (int64_t k = 0; k < num_units * PER_UNIT<T>; ++k) {
                const int64_t place = (k / PER_UNIT<T> * WIDE + out) * PER_UNIT<T> + k % PER_UNIT<T>;
                target[place] = numbers[(first + out) * outer_stride + (unit * PER_UNIT<T> + k) * inner_stride];
            }
    }
};

// Adds the products of NUM rows with a part of a panel to `sums` [NUM, WIDE], and fetches FETCHED lines per unit.
template <typename Kind, int NUM, int FETCHED>
inline void add_rows(const typename Kind::X* x, int64_t inner, const Unit* panel, int64_t num_units, float* sums,
                     const Unit* next) {
    Vec total[NUM][PARTS];
    for (int row = 0; row < NUM; ++row)
        for (int part = 0; part < PARTS; ++part) total[row][part] = load(sums + row * WIDE + part * LANES);
    for (int64_t k = 0; k < num_units; ++k) {
        for (int line = 0; line < FETCHED; ++line) __builtin_prefetch(next + (k * FETCHED + line) * 16, 0, 2);
        const float* units = reinterpret_cast<const float*>(panel) + k * WIDE;
        for (int part = 0; part < PARTS; ++part) {
            const Kind weight(in_register(load(units + part * LANES)));
            for (int row = 0; row < NUM; ++row)
                total[row][part] = weight.add_products(total[row][part], x + row * inner + k * Kind::TERMS);
        }
    }
    for (int row = 0; row < NUM; ++row)
        for (int part = 0; part < PARTS; ++part) store(sums + row * WIDE + part * LANES, total[row][part]);
}

template <typename Kind, int FETCHED>
inline void add_tile(int64_t num, const typename Kind::X* x, int64_t inner, const Unit* panel, int64_t num_units,
                     float* sums, const Unit* next) {
    if (num == 1) add_rows<Kind, 1, FETCHED>(x, inner, panel, num_units, sums, next);
    else if (num == 2) add_rows<Kind, 2, FETCHED>(x, inner, panel, num_units, sums, next);
    else if (num == 3) add_rows<Kind, 3, FETCHED>(x, inner, panel, num_units, sums, next);
    else add_rows<Kind, ROWS, FETCHED>(x, inner, panel, num_units, sums, next);
}

// Adds the products of all rows with a part of a panel; `next` is a part as large that is needed then, or null.
template <typename Kind>
void add_part(const typename Kind::X* x, int64_t num_rows, int64_t inner, const Unit* panel, int64_t num_units,
              float* sums, const Unit* next) {
    const int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    const int64_t lines = next ? (LINES + num_tiles - 1) / num_tiles : 0;  // for each unit and tile
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = tile * ROWS, num = std::min<int64_t>(ROWS, num_rows - row);
        const typename Kind::X* own = x + row * inner;
        const Unit* from = next + tile * num_units * lines * 16;
        float* const own_sums = sums + row * WIDE;
        if (tile * lines >= LINES || !lines) add_tile<Kind, 0>(num, own, inner, panel, num_units, own_sums, next);
        else if (lines == 1) add_tile<Kind, 1>(num, own, inner, panel, num_units, own_sums, from);
        else if (lines == 2) add_tile<Kind, 2>(num, own, inner, panel, num_units, own_sums, from);
        else add_tile<Kind, 4>(num, own, inner, panel, num_units, own_sums, from);
    }
}

// Computes x [N, inner] times the weight, plus `added` [N, outer] (null: none), into `out` [N, outer].
template <typename Kind, typename T>
void multiply_as(const typename Kind::X* x, int64_t num_rows, const Weight<T>& weight, const Unit* packed,
                 const T* added, T* out, int64_t num_threads) {
    if (!num_rows) return;
    const int64_t num_panels = (weight.outer + WIDE - 1) / WIDE, num_units = weight.num_units();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const std::unique_ptr<float[]> sums(new float[num_rows * WIDE]);
        const std::unique_ptr<Unit[]> turned(new Unit[packed ? 0 : PART_UNITS * WIDE]);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            const int64_t first = panel * WIDE, num = std::min(WIDE, weight.outer - first);
            std::fill(sums.get(), sums.get() + num_rows * WIDE, 0.0f);
            for (int64_t unit = 0; unit < num_units; unit += PART_UNITS) {
                const int64_t size = std::min(PART_UNITS, num_units - unit);
                const Unit* part = packed + (panel * num_units + unit) * WIDE;
                const bool is_last = panel + 1 == num_panels && unit + size == num_units;
                const Unit* next = packed && !is_last ? part + size * WIDE : nullptr;
                if (!packed) {
                    weight.turn(first, unit, size, turned.get());
                    part = turned.get();
                }
                add_part<Kind>(x + unit * Kind::TERMS, num_rows, weight.inner, part, size, sums.get(), next);
            }
            for (int64_t row = 0; row < num_rows; ++row) {
                const float* sum = sums.get() + row * WIDE;
                T* target = out + row * weight.outer + first;
                if (added) {
                    const T* other = added + row * weight.outer + first;
                    for (int64_t i = 0; i < num; ++i) narrow(sum[i] + widen(other[i]), target + i);
                } else {
                    for (int64_t i = 0; i < num; ++i) narrow(sum[i], target + i);
                }
            }
        }
    }
}

inline void multiply(const float* x, int64_t num_rows, const Weight<float>& weight, const Unit* packed,
                     const float* added, float* out, int64_t num_threads) {
    multiply_as<Float32>(x, num_rows, weight, packed, added, out, num_threads);
}

inline void multiply(const uint16_t* x, int64_t num_rows, const Weight<uint16_t>& weight, const Unit* packed,
                     const uint16_t* added, uint16_t* out, int64_t num_threads) {
#if defined(__AVX512BF16__)
    if (!__builtin_cpu_is("intel"))  // whose instruction takes twice the time of floats
        return multiply_as<Bfloat16>(x, num_rows, weight, packed, added, out, num_threads);
#endif
    const int64_t count = num_rows * weight.inner;
    const std::unique_ptr<float[]> wide(new float[count]);
    for (int64_t i = 0; i < count; ++i) wide[i] = widen(x[i]);
    multiply_as<WideBfloat16>(wide.get(), num_rows, weight, packed, added, out, num_threads);
}

template <typename T>
void pack(const Weight<T>& weight, Unit* packed) {
    const int64_t num_units = weight.num_units();
    for (int64_t first = 0; first < weight.outer; first += WIDE)
        weight.turn(first, 0, num_units, packed + first * num_units);
}

}  // namespace
