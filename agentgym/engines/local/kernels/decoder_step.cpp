// A step of the fast decoder in float32, compiled for the machine (see ../decoder_step.py). A row's bits depend on its
// token, and on the keys and values that it sees, alone: products and attention are those of the other kernels, and all
// else takes one row at a time.

#include <cmath>
#include <cstdint>
#include <vector>

#include "row_products.h"
#include "slot_attention.h"

// The structs are those of ../decoder_step.py.
struct Matrix {
    const float* numbers;
    int64_t outer, inner, outer_stride, inner_stride;
    const Unit* packed;  // null: there is no copy in the order of the kernel
};

struct Layer {
    const float* input_norm;
    Matrix qkv;
    const float *qkv_bias, *q_norm, *k_norm;  // null: none
    Matrix out;
    const float* ffn_norm;
    Matrix gate_up, down;
    float* stored;  // [2, S, K, W, D]
};

struct Model {
    int64_t num_layers, width, num_heads, num_kv_heads, head_width, ffn_width, num_slots, window;
    float norm_eps, scale;  // of queries
    const float *embed, *cos, *sin, *final_norm;  // [V, E], [T, D], [T, D], [E]
    Matrix head;
    const Layer* layers;
};

struct Due {
    int64_t num_rows, num_wanted;
    const int64_t *ids, *slots, *positions, *roots, *commons, *wanted;
};

namespace {

// Calls a function for each row.
template <typename F>
void for_rows(int64_t num_rows, int64_t num_threads, F function) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < num_rows; ++row) function(row);
}

// Writes x divided by its root mean square, times a weight.
void norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
    Vec squares = {};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < width; ++i) rest += x[i] * x[i];
    const float factor = 1.0f / std::sqrt((sum_of(squares) + rest) / width + eps);
    for (i = 0; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

// Rotates the halves of a head into each other; `sin` is negative in its first half.
void rotate(const float* x, const float* cos, const float* sin, int64_t width, float scale, float* out) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
        out[i] = (x[i] * cos[i] + x[i + half] * sin[i]) * scale;
        out[i + half] = (x[i + half] * cos[i + half] + x[i] * sin[i + half]) * scale;
    }
}

// Writes silu(gate) * up; vectors of LANES numbers need not be whole at the end.
void gate(const float* gates, const float* ups, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t num = std::min<int64_t>(LANES, width - i);
        Vec x = {}, up = {};
        std::memcpy(&x, gates + i, num * sizeof(float));
        std::memcpy(&up, ups + i, num * sizeof(float));
        const Vec decay = exp_of(select(x < 0.0f, x, -x));  // e^-|x|
        const Vec product = x * select(x < 0.0f, decay, splat(1.0f)) / (1.0f + decay) * up;
        std::memcpy(out + i, &product, num * sizeof(float));
    }
}

void multiply_all(const float* x, int64_t num_rows, const Matrix& m, const float* added, float* out,
                  int64_t num_threads) {
    multiply(x, num_rows, {m.numbers, m.outer, m.inner, m.outer_stride, m.inner_stride}, m.packed, added, out,
             num_threads);
}

class DecoderStep {
public:
    DecoderStep(const Model& model, const Due& due, int64_t num_threads)
        : m(model), due(due), threads(num_threads), q_width(m.num_heads * m.head_width),
          kv_width(m.num_kv_heads * m.head_width) {
        const int64_t widest = std::max(q_width + 2 * kv_width, 2 * m.ffn_width);
        const int64_t sizes[] = {m.width, std::max(m.width, m.ffn_width), widest, q_width, kv_width, kv_width, q_width};
        float** const parts[] = {&x, &h, &flat, &q, &k, &v, &attended};
        int64_t total = 0;
        for (int64_t size : sizes) total += size * due.num_rows;
        thread_local std::vector<float> room;
        if ((int64_t)room.size() < total) room.resize(total);
        float* next = room.data();
        for (int i = 0; i < 7; next += sizes[i++] * due.num_rows) *parts[i] = next;
    }

    // Writes logits [R, V].
    void compute(float* logits) {
        for_rows(due.num_rows, threads, [&](int64_t row) {
            std::memcpy(x + row * m.width, m.embed + due.ids[row] * m.width, m.width * sizeof(float));
        });
        for (int64_t layer = 0; layer < m.num_layers; ++layer) {
            read(m.layers[layer]);
            mix(m.layers[layer]);
        }
        for_rows(due.num_wanted, threads, [&](int64_t row) {
            norm(x + due.wanted[row] * m.width, m.final_norm, m.width, m.norm_eps, h + row * m.width);
        });
        multiply_all(h, due.num_wanted, m.head, nullptr, logits, threads);
    }

private:
    const Model& m;
    const Due& due;
    const int64_t threads, q_width, kv_width;
    float *x, *h, *flat, *q, *k, *v, *attended;

    // Computes queries, keys and values, and what each row reads.
    void read(const Layer& layer) {
        for_rows(due.num_rows, threads, [&](int64_t row) {
            norm(x + row * m.width, layer.input_norm, m.width, m.norm_eps, h + row * m.width);
        });
        multiply_all(h, due.num_rows, layer.qkv, nullptr, flat, threads);
        for_rows(due.num_rows, threads, [&](int64_t row) {
            float* own = flat + row * (q_width + 2 * kv_width);
            if (layer.qkv_bias)
                for (int64_t i = 0; i < q_width + 2 * kv_width; ++i) own[i] += layer.qkv_bias[i];
            turn_heads(row, own, m.num_heads, layer.q_norm, m.scale, q + row * q_width);
            turn_heads(row, own + q_width, m.num_kv_heads, layer.k_norm, 1.0f, k + row * kv_width);
            std::memcpy(v + row * kv_width, own + q_width + kv_width, kv_width * sizeof(float));
        });
        const Sizes sizes = {due.num_rows, m.num_heads, m.num_kv_heads, m.head_width,  m.head_width,
                             m.num_slots,  m.window,    m.head_width,   0.0f};
        attend<float>({sizes, q, k, v, layer.stored, due.slots, due.positions, nullptr, due.roots, due.commons, nullptr,
                       attended},
                      threads);
    }

    void turn_heads(int64_t row, float* heads, int64_t num, const float* weight, float scale, float* out) const {
        const int64_t place = due.positions[row] * m.head_width;
        for (int64_t head = 0; head < num; ++head, heads += m.head_width, out += m.head_width) {
            if (weight) norm(heads, weight, m.head_width, m.norm_eps, heads);
            rotate(heads, m.cos + place, m.sin + place, m.head_width, scale, out);
        }
    }

    // Adds what was read, and the feed-forward, to the residual stream.
    void mix(const Layer& layer) {
        multiply_all(attended, due.num_rows, layer.out, x, x, threads);
        for_rows(due.num_rows, threads, [&](int64_t row) {
            norm(x + row * m.width, layer.ffn_norm, m.width, m.norm_eps, h + row * m.width);
        });
        multiply_all(h, due.num_rows, layer.gate_up, nullptr, flat, threads);
        for_rows(due.num_rows, threads, [&](int64_t row) {
            const float* own = flat + row * 2 * m.ffn_width;
            gate(own, own + m.ffn_width, m.ffn_width, h + row * m.ffn_width);
        });
        multiply_all(h, due.num_rows, layer.down, x, x, threads);
    }
};

}  // namespace

extern "C" void decoder_step(const Model* model, const Due* due, float* logits, int64_t num_threads) {
    DecoderStep(*model, *due, num_threads).compute(logits);
}
