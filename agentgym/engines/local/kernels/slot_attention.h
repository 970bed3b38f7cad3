// Attention of tokens to the keys of their own slots, on a CPU.
//
// The bits of a result depend on the token's query, and on the keys and values that it sees, alone. Each score is
// summed over the width in one order. Keys are taken in blocks that begin at multiples of BLOCK, and the values of a
// block are added one after the other. A key that is hidden from a token adds an exact zero. So tokens of one slot are
// computed together, which reads keys and values once for many of them, and have the bits that each has alone. So are
// tokens of slots that begin with the same keys, which are read from one of them, the root.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 256;  // keys
constexpr int64_t TILE = 64;    // queries (of tokens and heads) that are computed together, at most
constexpr int64_t TURNED = 8;   // queries of a tile from which on it pays to write the keys column by column
constexpr float HIDDEN = -INFINITY;

// The scores of one query to LANES keys.
template <typename T>
inline Vec scores_of(const float* query, const T* keys, int64_t width, int64_t stride) {
    Vec sums[LANES] = {};
    for (int64_t column = 0; column < width; column += LANES) {
        const Vec part = load(query + column);
#pragma GCC unroll 16
        for (int key = 0; key < LANES; ++key) sums[key] += part * load(keys + key * stride + column);
    }
    return sums_of<LANES>(sums);
}

// Writes LANES keys column by column.
template <typename T>
inline void turn(const T* keys, int64_t width, int64_t stride, float* columns) {
    for (int64_t column = 0; column < width; column += LANES) {
        Vec part[LANES];
        for (int key = 0; key < LANES; ++key) part[key] = load(keys + key * stride + column);
        transpose(part);
        for (int i = 0; i < LANES; ++i) store(columns + (column + i) * LANES, part[i]);
    }
}

// Writes the scores of NUM queries to LANES keys that were turned; the bits are those of `scores_of`.
template <int NUM>
inline void scores_of_turned(const float* queries, const float* columns, int64_t width, float* out) {
    constexpr int PART = NUM > 2 ? 4 : 8;
    Vec sums[NUM][LANES / PART];
    for (int part = 0; part < LANES / PART; ++part) {
        Vec by_lane[NUM][PART] = {};
        for (int64_t column = part * PART; column < width; column += LANES)
#pragma GCC unroll 8
            for (int i = 0; i < PART; ++i) {
                const Vec keys = in_register(load(columns + (column + i) * LANES));
                for (int query = 0; query < NUM; ++query)
                    by_lane[query][i] += queries[query * width + column + i] * keys;
            }
        for (int query = 0; query < NUM; ++query) sums[query][part] = add_all<PART>(by_lane[query]);
    }
    for (int query = 0; query < NUM; ++query) store(out + query * BLOCK, add_all<LANES / PART>(sums[query]));
}

// Adds weights times values to the results of ROWS queries, in PARTS vectors of columns. Meanwhile it asks for as many
// of the keys that come next, since too few queries do not hide the time that memory takes.
template <int ROWS, int PARTS, typename T>
inline void mix(float* out, int64_t width, const float* weights, const T* values, int64_t stride, int64_t num_keys,
                const T* next) {
    Vec sums[ROWS][PARTS];
    for (int row = 0; row < ROWS; ++row)
        for (int part = 0; part < PARTS; ++part) sums[row][part] = load(out + row * width + part * LANES);
    for (int64_t key = 0; key < num_keys; ++key) {
        if (next) fetch(next + key * stride, stride);
        Vec value[PARTS];
        for (int part = 0; part < PARTS; ++part) value[part] = in_register(load(values + key * stride + part * LANES));
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PARTS; ++part) sums[row][part] += weights[row * BLOCK + key] * value[part];
    }
    for (int row = 0; row < ROWS; ++row)
        for (int part = 0; part < PARTS; ++part) store(out + row * width + part * LANES, sums[row][part]);
}

template <int PARTS, typename T>
void mix_rows(float* out, int64_t width, int64_t num, const float* weights, const T* values, int64_t stride,
              int64_t num_keys, const T* next) {
    constexpr int MANY = 16 / PARTS;  // as many sums as registers hold
    int64_t row = 0;
    for (; row + MANY <= num; row += MANY, next = nullptr)
        mix<MANY, PARTS>(out + row * width, width, weights + row * BLOCK, values, stride, num_keys, next);
    for (; row + 2 <= num; row += 2, next = nullptr)
        mix<2, PARTS>(out + row * width, width, weights + row * BLOCK, values, stride, num_keys, next);
    if (row < num) mix<1, PARTS>(out + row * width, width, weights + row * BLOCK, values, stride, num_keys, next);
}

template <typename T>
void mix_all(float* out, int64_t width, int64_t num, const float* weights, const T* values, int64_t stride,
             int64_t num_keys, const T* next) {
    int64_t column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES, next = nullptr)
        mix_rows<4>(out + column, width, num, weights, values + column, stride, num_keys, next);
    for (; column + 2 * LANES <= width; column += 2 * LANES, next = nullptr)
        mix_rows<2>(out + column, width, num, weights, values + column, stride, num_keys, next);
    if (column < width) mix_rows<1>(out + column, width, num, weights, values + column, stride, num_keys, next);
}

}  // namespace

// The sizes of a step, as in slot_attention.py.
struct Sizes {
    int64_t num_tokens, num_heads, num_kv_heads, key_width, value_width, num_slots, window, stored_width;
    float softcap;  // 0 for none
};

namespace {

int64_t padded_width(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// The tensors of a step: queries [N, H, D], keys and values [N, K, D], stored ones [2, S, K, W, D], slots, positions
// and first keys [N] (null: 0), roots and how many keys are theirs [N] (null: all keys are those of the token's slot),
// sinks [H] (null: none), and results [N, H, D].
template <typename T>
struct Step {
    Sizes sizes;
    const T *queries, *keys, *values;
    T* stored;
    const int64_t *slots, *positions, *firsts, *roots, *commons;
    const T* sinks;
    T* out;

    int64_t group() const { return sizes.num_heads / sizes.num_kv_heads; }

    // The slot that has a token's first keys, and how many.
    std::pair<int64_t, int64_t> root(int64_t token) const {
        return roots ? std::pair(roots[token], commons[token]) : std::pair(slots[token], sizes.window);
    }

    T* stored_keys(int64_t slot, int64_t kv_head) const {
        return stored + (slot * sizes.num_kv_heads + kv_head) * sizes.window * sizes.stored_width;
    }

    int64_t values_after() const { return sizes.num_slots * sizes.num_kv_heads * sizes.window * sizes.stored_width; }

    void write() const {
        for (int64_t token = 0; token < sizes.num_tokens; ++token)
            for (int64_t head = 0; head < sizes.num_kv_heads; ++head) {
                T* key = stored_keys(slots[token], head) + positions[token] * sizes.stored_width;
                const int64_t own = token * sizes.num_kv_heads + head;
                std::memcpy(key, keys + own * sizes.key_width, sizes.key_width * sizeof(T));
                std::memcpy(key + values_after(), values + own * sizes.value_width, sizes.value_width * sizeof(T));
            }
    }

    // Returns the tokens in an order in which those of one root are neighbours.
    std::vector<int64_t> order() const {
        std::vector<int64_t> tokens(sizes.num_tokens);
        std::iota(tokens.begin(), tokens.end(), 0);
        if (roots)
            std::stable_sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) { return root(a) < root(b); });
        return tokens;
    }

    // Returns the first place of each tile, whose tokens have one root, and the number of places.
    std::vector<int64_t> tiles(const std::vector<int64_t>& tokens) const {
        const int64_t most = std::max<int64_t>(1, TILE / group());
        std::vector<int64_t> cuts{0};
        for (int64_t place = 1; place <= sizes.num_tokens; ++place)
            if (place == sizes.num_tokens || root(tokens[place]) != root(tokens[place - 1]) ||
                place - cuts.back() == most)
                cuts.push_back(place);
        return cuts;
    }
};

// The queries of one tile, and what was computed of their results so far.
template <typename T>
class Tile {
public:
    // Returns how many numbers a tile needs room for.
    static int64_t room(const Step<T>& step) {
        const int64_t most = std::max(TILE, step.group());
        const int64_t key_width = padded_width(step.sizes.key_width);
        return most * (key_width + padded_width(step.sizes.value_width) + BLOCK + 2) + key_width * LANES;
    }

    // `following` are keys of the tile that is computed next.
    Tile(const Step<T>& step, const int64_t* tokens, int64_t num_tokens, int64_t kv_head, const T* following,
         float* room)
        : step(step), tokens(tokens), num_tokens(num_tokens), kv_head(kv_head), num(num_tokens * step.group()),
          common(step.root(tokens[0]).second / LANES * LANES), following(following),
          key_width(padded_width(step.sizes.key_width)), value_width(padded_width(step.sizes.value_width)),
          queries(room), mixed(queries + num * key_width), weights(mixed + num * value_width),
          most(weights + num * BLOCK), total(most + num), columns(total + num) {
        std::fill(queries, weights, 0.0f);
        std::fill(most, most + num, HIDDEN);
        std::fill(total, total + num, 0.0f);
        for (int64_t query = 0; query < num; ++query) {
            const int64_t head = kv_head * step.group() + query % step.group();
            const T* source = step.queries + (token_of(query) * step.sizes.num_heads + head) * step.sizes.key_width;
            for (int64_t column = 0; column < step.sizes.key_width; ++column)
                queries[query * key_width + column] = widen(source[column]);
            if (step.sinks) {
                most[query] = widen(step.sinks[head]);
                total[query] = 1.0f;
            }
        }
    }

    void attend() {
        int64_t from = first_key(0);
        until = 0;
        for (int64_t query = 0; query < num; query += step.group()) {
            from = std::min(from, first_key(query));
            until = std::max(until, last_key(query) + 1);
        }
        for (int64_t start = from / BLOCK * BLOCK; start < until; start += BLOCK)
            add_block(start, std::min(BLOCK, until - start));
        for (int64_t query = 0; query < num; ++query) {
            const int64_t head = kv_head * step.group() + query % step.group();
            T* target = step.out + (token_of(query) * step.sizes.num_heads + head) * step.sizes.value_width;
            for (int64_t column = 0; column < step.sizes.value_width; ++column)
                narrow(mixed[query * value_width + column] / total[query], target + column);
        }
    }

private:
    const Step<T>& step;
    const int64_t* const tokens;
    const int64_t num_tokens, kv_head, num;
    const int64_t common;  // the number of keys that are the root's
    const T* const following;
    const int64_t key_width, value_width;
    int64_t until = 0;  // the last key of all queries, and one
    float *const queries, *const mixed, *const weights, *const most, *const total, *const columns;
    // [num, key_width], [num, value_width], [num, BLOCK], [num], [num], [key_width, LANES]

    int64_t token_of(int64_t query) const { return tokens[query / step.group()]; }
    int64_t first_key(int64_t query) const { return step.firsts ? step.firsts[token_of(query)] : 0; }
    int64_t last_key(int64_t query) const { return step.positions[token_of(query)]; }

    // The keys of a slot from one on.
    const T* keys_at(int64_t slot, int64_t key) const {
        return step.stored_keys(slot, kv_head) + key * step.sizes.stored_width;
    }

    // Adds keys of all queries: first those that the root has for all tokens, then each token's own. While keys are
    // read for few queries, it asks for those that are read next.
    void add_block(int64_t start, int64_t num_keys) {
        const int64_t shared = std::clamp<int64_t>(common - start, 0, num_keys), own = start + shared;
        const int64_t group = step.group(), after = step.values_after();
        const T* keys = keys_at(step.root(tokens[0]).first, start);
        const T* next = start + BLOCK < until ? keys_at(slot_at(start + BLOCK), start + BLOCK) : following;
        score(keys, shared, 0, num, weights, keys + after);
        if (own < start + num_keys)
            for (int64_t token = 0; token < num_tokens; ++token) {
                const int64_t slot = step.slots[tokens[token]];
                const T* coming = token + 1 < num_tokens ? keys_at(step.slots[tokens[token + 1]], own)
                                                         : keys_at(step.slots[tokens[0]], own) + after;
                score(keys_at(slot, own), num_own(token, own, start + num_keys), token * group, (token + 1) * group,
                      weights + shared, coming);
            }
        for (int64_t query = 0; query < num; ++query) weigh(query, start, num_keys);
        mix(0, num, weights, keys + after, shared, own < start + num_keys ? nullptr : next);
        if (own < start + num_keys)
            for (int64_t token = 0; token < num_tokens; ++token) {
                const T* values = keys_at(step.slots[tokens[token]], own) + after;
                const T* coming =
                    token + 1 < num_tokens ? keys_at(step.slots[tokens[token + 1]], own) + after : next;
                mix(token * group, group, weights + shared, values, num_own(token, own, start + num_keys), coming);
            }
    }

    // The slot from which a key is read first.
    int64_t slot_at(int64_t key) const { return key < common ? step.root(tokens[0]).first : step.slots[tokens[0]]; }

    // The number of keys in [from, to) that a token sees.
    int64_t num_own(int64_t token, int64_t from, int64_t to) const {
        return std::max<int64_t>(0, std::min(to, step.positions[tokens[token]] + 1) - from);
    }

    // Writes the scores of queries [first, last) to keys of one slot.
    void score(const T* keys, int64_t num_keys, int64_t first, int64_t last, float* out, const T* coming) {
        const int64_t stride = step.sizes.stored_width;
        for (int64_t key = 0; key < num_keys; key += LANES, keys += LANES * stride, out += LANES) {
            int64_t query = first;
            if (last - first < TURNED) {
                fetch(coming + key * stride, LANES * stride);
            } else {
                turn(keys, key_width, stride, columns);
                for (; query + 4 <= last; query += 4)
                    scores_of_turned<4>(queries + query * key_width, columns, key_width, out + query * BLOCK);
                for (; query + 2 <= last; query += 2)
                    scores_of_turned<2>(queries + query * key_width, columns, key_width, out + query * BLOCK);
            }
            for (; query < last; ++query)
                store(out + query * BLOCK, scores_of(queries + query * key_width, keys, key_width, stride));
        }
    }

    // Adds weighted values of one slot to the results of queries.
    void mix(int64_t first, int64_t count, const float* weight, const T* values, int64_t num_keys, const T* coming) {
        mix_all(mixed + first * value_width, value_width, count, weight + first * BLOCK, values,
                step.sizes.stored_width, num_keys, count < TURNED ? coming : nullptr);
    }

    // Makes the weights of one query of its scores, and scales what was added before to the new highest score.
    void weigh(int64_t query, int64_t start, int64_t num_keys) {
        const int64_t low = first_key(query) - start, high = last_key(query) - start;
        const float softcap = step.sizes.softcap;
        float* weight = weights + query * BLOCK;
        Vec highest = splat(HIDDEN);
        for (int64_t key = 0; key < num_keys; key += LANES) {
            Vec score = load(weight + key);
            if (softcap != 0.0f) score = tanh_of(score / softcap) * softcap;
            if (key < low || key + LANES - 1 > high)
                for (int lane = 0; lane < LANES; ++lane)
                    if (key + lane < low || key + lane > high) score[lane] = HIDDEN;
            store(weight + key, score);
            highest = select(score > highest, score, highest);
        }
        const float next = std::max(most[query], max_of(highest));
        if (next == HIDDEN) {  // no key so far
            std::fill(weight, weight + padded_width(num_keys), 0.0f);
            return;
        }
        Vec sum = {};
        for (int64_t key = 0; key < num_keys; key += LANES) {
            const Vec part = exp_of(load(weight + key) - next);
            store(weight + key, part);
            sum += part;
        }
        const float kept = exp_of(splat(most[query] - next))[0];
        total[query] = total[query] * kept + sum_of(sum);
        most[query] = next;
        if (kept != 1.0f)
            for (int64_t column = 0; column < value_width; ++column) mixed[query * value_width + column] *= kept;
    }
};

template <typename T>
void attend(const Step<T>& step, int64_t num_threads) {
    step.write();
    const std::vector<int64_t> tokens = step.order(), cuts = step.tiles(tokens);
    const int64_t num_kv_heads = step.sizes.num_kv_heads, num_tasks = ((int64_t)cuts.size() - 1) * num_kv_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const std::unique_ptr<float[]> room(new float[Tile<T>::room(step)]);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num_tasks; ++task) {
            const int64_t tile = task / num_kv_heads, next = (task + 1) / num_kv_heads;
            const int64_t token = tokens[cuts[std::min<int64_t>(next, cuts.size() - 2)]];
            const int64_t common = step.root(token).second, key = common < step.sizes.window ? common : 0;
            const T* following = step.stored_keys(step.slots[token], (task + 1) % num_kv_heads);
            following += std::max(key, step.firsts ? step.firsts[token] : 0) * step.sizes.stored_width;
            Tile<T>(step, &tokens[cuts[tile]], cuts[tile + 1] - cuts[tile], task % num_kv_heads, following, room.get())
                .attend();
        }
    }
}

}  // namespace
