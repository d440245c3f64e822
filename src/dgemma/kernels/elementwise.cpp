// Norms, random numbers and the vocabulary scan on CPUs, compiled on the user's machine at first use.
//
// torch computes each of these in many small operations: each reads and writes memory, and costs microseconds to call.
// Reference implementations: `rms_norm` and `gated_gelu` of model/layers.py, `rotate` of model/attention.py, `combine` of
// model/moe.py, `race_times` of sampling/rng.py, `scan_block` of sampling/vocab_scan.py. All sums have a fixed order, so a row's bits depend neither on other rows nor on threads.
// Compiled with -ffp-contract=off: each operation is rounded by itself, and random numbers have torch's bits.

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int LANES = 16;
constexpr int PARALLEL = 1 << 15;  // fewer numbers are done before another thread wakes up
constexpr int BLOCK = 2048;        // tokens of a block, as in vocab_scan.py
constexpr int MAX_CHUNKS = 2;         // of a block
constexpr float MIN_BELOW = -80.0f;  // a share below e^-80 counts as 0: denormal numbers would slow products down 18 times

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint64_t Longs __attribute__((vector_size(8 * LANES)));

struct Bf16 {
    uint16_t bits;
};

inline Floats all(float value) { return Floats{} + value; }

template <class To, class From>
inline To bits_of(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from));
    memcpy(&to, &from, sizeof(to));
    return to;
}

inline Floats load(const float *from) {
    Floats to;
    memcpy(&to, from, sizeof(to));
    return to;
}

inline Floats load(const Bf16 *from) {
    Halves half;
    memcpy(&half, from, sizeof(half));
    return bits_of<Floats>(__builtin_convertvector(half, Words) << 16);
}

inline void store(float *to, Floats from) { memcpy(to, &from, sizeof(from)); }

inline void store(Bf16 *to, Floats from) {  // to the nearest, ties to even. No number here is NaN by itself.
    const Words bits = bits_of<Words>(from);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Halves half = __builtin_convertvector(from == from ? rounded : quiet, Halves);
    memcpy(to, &half, sizeof(half));
}

// What storing and loading makes of it: torch rounds after each operation.
inline Floats rounded(const float *, Floats x) { return x; }

inline Floats rounded(const Bf16 *, Floats x) {
    Bf16 part[LANES];
    store(part, x);
    return load(part);
}

// The last, partial register of a row.
template <class T>
inline Floats load(const T *from, int64_t count, float rest) {
    T part[LANES];
    memset(part, 0, sizeof(part));
    memcpy(part, from, count * sizeof(T));
    Floats to = load(part);
    for (int lane = count; lane < LANES; lane++) to[lane] = rest;
    return to;
}

template <class T>
inline void store(T *to, Floats from, int64_t count) {
    T part[LANES];
    store(part, from);
    memcpy(to, part, count * sizeof(T));
}

inline float sum(Floats x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
    return x[0];
}

inline float max(Floats x) {
    float top = x[0];
    for (int lane = 1; lane < LANES; lane++) top = x[lane] > top ? x[lane] : top;
    return top;
}

// Within 2 units in the last place for x in [-87, 88].
inline Floats exp(Floats x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * bits_of<Floats>((bits_of<Ints>(shifted) + (127 - 0x4b400000)) << 23);
}

inline Floats tanh(Floats x) {
    const Floats size = bits_of<Floats>(bits_of<Words>(x) & 0x7fffffff);
    const Floats square = x * x;
    Floats p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const Floats small = p * square * x + x;
    const Floats bounded = size < 15.0f ? size : all(15.0f);
    const Floats large = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
    const Floats signed_large = bits_of<Floats>(bits_of<Words>(large) | (bits_of<Words>(x) & 0x80000000u));
    return size < 0.625f ? small : signed_large;
}

template <class T>
void norm_row(const T *x, const T *weight, float eps, int64_t size, T *y) {
    const int64_t whole = size / LANES * LANES, left = size - whole;
    Floats squares = all(0);
    for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
    if (left) {
        const Floats last = load(x + whole, left, 0);
        squares += last * last;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / float(size) + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        const Floats normed = load(x + i) * scale;
        store(y + i, weight ? normed * load(weight + i) : normed);
    }
    if (left) {
        const Floats normed = load(x + whole, left, 0) * scale;
        store(y + whole, weight ? normed * load(weight + whole, left, 0) : normed, left);
    }
}

template <class T>
void norm_rows(const T *x, const T *weight, float eps, int64_t rows, int64_t size, T *y) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * size, weight, eps, size, y + row * size);
}

// y = gelu(gate) * up for one row.
template <class T>
void gate_row(const T *gate, const T *up, int64_t size, T *y) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const Floats x = left >= LANES ? load(gate + i) : load(gate + i, left, 0);
        const Floats other = left >= LANES ? load(up + i) : load(up + i, left, 0);
        const Floats inner = 0.7978845608f * (x + 0.044715f * (x * x * x));
        const Floats product = rounded(y, 0.5f * x * (1.0f + tanh(inner))) * other;
        if (left >= LANES) store(y + i, product);
        else store(y + i, product, left);
    }
}

// Gradients of a row of the norm: to x, and added to that of the weight.
void norm_row_backward(const float *x, const float *weight, const float *grad, float eps, int64_t size, float *to_x,
                       float *to_weight) {
    const auto read = [&](const float *from, int64_t i) {
        return size - i >= LANES ? load(from + i) : load(from + i, size - i, 0);
    };
    Floats squares = all(0), along = all(0);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats number = read(x, i), slope = weight ? read(grad, i) * read(weight, i) : read(grad, i);
        squares += number * number;
        along += number * slope;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / float(size) + eps);
    const float share = sum(along) * scale * scale * scale / float(size);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i < LANES ? size - i : LANES;
        const Floats number = read(x, i), given = read(grad, i), slope = weight ? given * read(weight, i) : given;
        store(to_x + i, slope * scale - number * share, left);
        if (to_weight) store(to_weight + i, read(to_weight, i) + given * number * scale, left);
    }
}

// Gradients of gelu(gate) * up for one row.
void gate_row_backward(const float *gate, const float *up, const float *grad, int64_t size, float *to_gate, float *to_up) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i < LANES ? size - i : LANES;
        const auto read = [&](const float *from) { return left == LANES ? load(from + i) : load(from + i, left, 0); };
        const Floats x = read(gate), given = read(grad);
        const Floats t = tanh(0.7978845608f * (x + 0.044715f * (x * x * x)));
        const Floats slope = 0.7978845608f * (1.0f + 0.134145f * (x * x));
        store(to_up + i, given * (0.5f * x * (1.0f + t)), left);
        store(to_gate + i, given * read(up) * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope), left);
    }
}

// y = x * cos + turned * sin for one head, of which `half` numbers stand against `half` others.
template <class T>
void rotate_head(const T *x, const T *cos, const T *sin, int64_t half, T *y) {
    for (int part = 0; part < 2; part++) {
        const int64_t at = part * half;
        const T *turned = x + (part ? 0 : half);
        const float sign = part ? 1.0f : -1.0f;
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t left = half - i;
            const auto read = [&](const T *from) { return left >= LANES ? load(from + i) : load(from + i, left, 0); };
            const Floats sum = rounded(y, read(x + at) * read(cos + at)) + rounded(y, sign * read(turned) * read(sin + at));
            if (left >= LANES) store(y + at + i, sum);
            else store(y + at + i, sum, left);
        }
    }
}

// y = sum over the experts of a token of weight * output, in their order.
template <class T>
void combine_row(const T *outputs, const float *weights, const int64_t *slots, int64_t experts, int64_t size, T *y) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const auto read = [&](int64_t k) {
            const T *from = outputs + slots[k] * size + i;
            return (left >= LANES ? load(from) : load(from, left, 0)) * weights[k];
        };
        Floats total = read(0);
        for (int64_t k = 1; k < experts; k++) total += read(k);
        if (left >= LANES) store(y + i, total);
        else store(y + i, total, left);
    }
}

template <class T>
void gate_rows(const T *gate, const T *up, int64_t rows, int64_t size, int64_t stride, T *y) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL)
    for (int64_t row = 0; row < rows; row++) gate_row(gate + row * stride, up + row * stride, size, y + row * size);
}

template <class T>
void rotate_heads(const T *x, const T *cos, const T *sin, int64_t tokens, int64_t heads, int64_t size, T *y) {
#pragma omp parallel for schedule(static) if (tokens * heads * size >= PARALLEL)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = (token * heads + head) * size;
            rotate_head(x + at, cos + token * size, sin + token * size, size / 2, y + at);
        }
}

template <class T>
void combine_rows(const T *outputs, const float *weights, const int64_t *slots, int64_t rows, int64_t experts,
                  int64_t size, T *y) {
#pragma omp parallel for schedule(static) if (rows * experts * size >= PARALLEL)
    for (int64_t row = 0; row < rows; row++)
        combine_row(outputs, weights + row * experts, slots + row * experts, experts, size, y + row * size);
}

// Philox-4x32-10, four words of LANES counters at once.
inline void philox(Words c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        const Longs product0 = __builtin_convertvector(c[0], Longs) * 0xD2511F53ull;
        const Longs product1 = __builtin_convertvector(c[2], Longs) * 0xCD9E8D57ull;
        const Words high0 = __builtin_convertvector(product0 >> 32, Words), low0 = __builtin_convertvector(product0, Words);
        const Words high1 = __builtin_convertvector(product1 >> 32, Words), low1 = __builtin_convertvector(product1, Words);
        const Words c1 = c[1], c3 = c[3];
        c[0] = high1 ^ c1 ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c3 ^ k1;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// As `exact_log` of rng.py, operation by operation. x is positive and normal.
inline Floats exact_log(Floats x) {
    const Words bits = bits_of<Words>(x);
    Ints exponent = bits_of<Ints>(bits >> 23) - 126;
    Floats mantissa = bits_of<Floats>((bits & 0x007fffffu) | 0x3f000000u);  // in [1/2, 1)
    const Ints low = mantissa < 0.70710678f;
    mantissa = low ? mantissa * 2.0f : mantissa;
    exponent = low ? exponent - 1 : exponent;
    const Floats s = (mantissa - 1.0f) / (mantissa + 1.0f);
    const Floats square = s * s;
    Floats series = square * float(1.0 / 9) + float(1.0 / 7);
    series = series * square + float(1.0 / 5);
    series = series * square + float(1.0 / 3);
    series = series * square + 1.0f;
    return 2.0f * s * series + __builtin_convertvector(exponent, Floats) * 0.69314718f;
}

inline Floats log_exponential(Words words) {
    const Floats unit = (__builtin_convertvector(words >> 9, Floats) + 0.5f) * 1.1920928955078125e-07f;  // 2^-23
    return exact_log(-exact_log(unit));
}

struct Counters {
    const int64_t *seed, *stream, *step;  // [rows]
    const int64_t *positions;             // [canvas]
    const int64_t *quads;                 // [rows, canvas, count]
    int64_t rows, canvas, count;
};

template <class Out, class Convert>
void each_counter(const Counters &all, Out *out, Convert convert) {
#pragma omp parallel for schedule(static) if (all.rows * all.canvas * all.count * 4 >= PARALLEL)
    for (int64_t at = 0; at < all.rows * all.canvas; at++) {
        const int64_t row = at / all.canvas, *quads = all.quads + at * all.count;
        const uint64_t key = uint64_t(all.seed[row]);
        for (int64_t i = 0; i < all.count; i += LANES) {
            const int64_t left = all.count - i < LANES ? all.count - i : LANES;
            Words c[4] = {Words{}, Words{} + uint32_t(all.positions[at % all.canvas]), Words{} + uint32_t(all.step[row]),
                          Words{} + uint32_t(all.stream[row])};
            for (int64_t lane = 0; lane < left; lane++) c[0][lane] = uint32_t(quads[i + lane]);
            philox(c, uint32_t(key), uint32_t(key >> 32));
            Out *to = out + (at * all.count + i) * 4;
            for (int word = 0; word < 4; word++) {
                const auto converted = convert(c[word]);
                for (int64_t lane = 0; lane < left; lane++) to[lane * 4 + word] = converted[lane];
            }
        }
    }
}

struct Scan {
    const void *products;  // [rows, canvas, stride], of which `tokens` count
    int64_t rows, canvas, tokens, stride, width, chunks, first_chunk;
    float cap;                 // 0: none
    const float *temperature;  // [rows], not zero
    const float *bias;         // [rows, bias_stride] or null
    int64_t bias_stride;
    const float *races;  // [rows, canvas, race_stride] or null
    int64_t race_stride;
    float *best_score, *race_score;  // [rows, canvas]
    int64_t *best_chunk, *race_chunk;
    void *best_products, *race_products;  // [rows, canvas, width]
    float *top;                           // [rows, canvas]
    float *mass, *moment;                 // [rows, canvas, chunks]
    void *shares;                         // [rows, canvas, tokens]
};

template <class T>
void lead(const Scan &scan, const T *products, int64_t at, float score, int64_t chunk, float *lead_score,
          int64_t *lead_chunk, void *lead_products) {
    if (!(score < lead_score[at])) return;
    lead_score[at] = score;
    lead_chunk[at] = scan.first_chunk + chunk;
    T *to = static_cast<T *>(lead_products) + at * scan.width;
    const int64_t begin = chunk * scan.width;
    const int64_t count = begin + scan.width <= scan.tokens ? scan.width : scan.tokens - begin;
    memcpy(to, products + begin, count * sizeof(T));
    memset(to + count, 0, (scan.width - count) * sizeof(T));
}

template <class T>
void scan_position(const Scan &scan, int64_t at) {
    const int64_t row = at / scan.canvas;
    const T *products = static_cast<const T *>(scan.products) + at * scan.stride;
    const float *bias = scan.bias ? scan.bias + row * scan.bias_stride : nullptr;
    const float gain = (scan.cap != 0 ? scan.cap : 1.0f) / scan.temperature[row];
    float logits[BLOCK + LANES], tops[MAX_CHUNKS];
    float top = -INFINITY;
    for (int64_t chunk = 0; chunk < scan.chunks; chunk++) {
        const int64_t begin = chunk * scan.width, end = begin + scan.width < scan.tokens ? begin + scan.width : scan.tokens;
        Floats tops_of_lanes = all(-INFINITY);
        for (int64_t i = begin; i < end; i += LANES) {
            const int64_t left = end - i;
            Floats logit = left >= LANES ? load(products + i) : load(products + i, left, 0);
            logit = scan.cap != 0 ? tanh(logit / scan.cap) * gain : logit / scan.temperature[row];
            if (bias) logit += left >= LANES ? load(bias + i) : load(bias + i, left, 0);
            for (int64_t lane = left; lane < LANES; lane++) logit[lane] = -INFINITY;
            store(logits + i, logit);
            tops_of_lanes = logit > tops_of_lanes ? logit : tops_of_lanes;
        }
        tops[chunk] = max(tops_of_lanes);
        top = tops[chunk] > top ? tops[chunk] : top;
    }
    scan.top[at] = top;
    const float base = isfinite(top) ? top : 0.0f;
    T *shares = static_cast<T *>(scan.shares) + at * scan.tokens;
    for (int64_t chunk = 0; chunk < scan.chunks; chunk++) {
        const int64_t begin = chunk * scan.width, end = begin + scan.width < scan.tokens ? begin + scan.width : scan.tokens;
        Floats mass = all(0), moment = all(0);
        for (int64_t i = begin; i < end; i += LANES) {
            const int64_t left = end - i;
            const Floats logit = left >= LANES ? load(logits + i) : load(logits + i, left, -INFINITY);
            const Floats below = logit - base;
            const auto dropped = below <= MIN_BELOW;  // not a NaN: that goes into the sums
            const Floats share = dropped ? all(0) : exp(dropped ? all(0) : below);
            mass += share;
            moment += dropped ? all(0) : share * below;
            if (left >= LANES) store(shares + i, share);
            else store(shares + i, share, left);
        }
        const float chunk_mass = sum(mass);
        scan.mass[at * scan.chunks + chunk] = chunk_mass;
        scan.moment[at * scan.chunks + chunk] = sum(moment);
        lead(scan, products, at, -tops[chunk], chunk, scan.best_score, scan.best_chunk, scan.best_products);
        if (!scan.races) continue;
        const float score = scan.races[at * scan.race_stride + chunk] - (top + logf(chunk_mass));
        lead(scan, products, at, score, chunk, scan.race_score, scan.race_chunk, scan.race_products);
    }
}

}  // namespace

extern "C" {

void rms_norm(const void *x, const void *weight, int is_bf16, float eps, int64_t rows, int64_t size, void *y) {
    if (is_bf16)
        norm_rows(static_cast<const Bf16 *>(x), static_cast<const Bf16 *>(weight), eps, rows, size, static_cast<Bf16 *>(y));
    else
        norm_rows(static_cast<const float *>(x), static_cast<const float *>(weight), eps, rows, size, static_cast<float *>(y));
}

// gate and up [rows, stride], of which `size` count.
void gated_gelu(const void *gate, const void *up, int is_bf16, int64_t rows, int64_t size, int64_t stride, void *y) {
    if (is_bf16)
        gate_rows(static_cast<const Bf16 *>(gate), static_cast<const Bf16 *>(up), rows, size, stride, static_cast<Bf16 *>(y));
    else
        gate_rows(static_cast<const float *>(gate), static_cast<const float *>(up), rows, size, stride, static_cast<float *>(y));
}

// to_weight [blocks, size], zeros: the sum over each block of `block` rows; null without a weight.
void rms_norm_backward(const float *x, const float *weight, const float *grad, float eps, int64_t rows, int64_t size,
                       int64_t block, float *to_x, float *to_weight) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL)
    for (int64_t first = 0; first < rows; first += block)
        for (int64_t row = first; row < rows && row < first + block; row++)
            norm_row_backward(x + row * size, weight, grad + row * size, eps, size, to_x + row * size,
                              to_weight ? to_weight + first / block * size : nullptr);
}

void gated_gelu_backward(const float *gate, const float *up, const float *grad, int64_t rows, int64_t size, int64_t stride,
                         float *to_gate, float *to_up) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL)
    for (int64_t row = 0; row < rows; row++)
        gate_row_backward(gate + row * stride, up + row * stride, grad + row * size, size, to_gate + row * size,
                          to_up + row * size);
}

// x [tokens, heads, size]; cos and sin [tokens, size].
void rotate(const void *x, const void *cos, const void *sin, int is_bf16, int64_t tokens, int64_t heads, int64_t size,
            void *y) {
    if (is_bf16)
        rotate_heads(static_cast<const Bf16 *>(x), static_cast<const Bf16 *>(cos), static_cast<const Bf16 *>(sin), tokens,
                     heads, size, static_cast<Bf16 *>(y));
    else
        rotate_heads(static_cast<const float *>(x), static_cast<const float *>(cos), static_cast<const float *>(sin), tokens,
                     heads, size, static_cast<float *>(y));
}

// outputs [slots, size]; weights and slots [rows, experts].
void combine(const void *outputs, const float *weights, const int64_t *slots, int is_bf16, int64_t rows, int64_t experts,
             int64_t size, void *y) {
    if (is_bf16)
        combine_rows(static_cast<const Bf16 *>(outputs), weights, slots, rows, experts, size, static_cast<Bf16 *>(y));
    else
        combine_rows(static_cast<const float *>(outputs), weights, slots, rows, experts, size, static_cast<float *>(y));
}

// quads [rows, canvas, count]; out [rows, canvas, 4 * count]: the four words of each counter, ...
void random_words(const int64_t *seed, const int64_t *stream, const int64_t *step, const int64_t *positions,
                  const int64_t *quads, int64_t rows, int64_t canvas, int64_t count, int64_t *out) {
    each_counter(Counters{seed, stream, step, positions, quads, rows, canvas, count}, out, [](Words words) { return words; });
}

// ... or a log of a unit exponential from each word.
void race_times(const int64_t *seed, const int64_t *stream, const int64_t *step, const int64_t *positions,
                const int64_t *quads, int64_t rows, int64_t canvas, int64_t count, float *out) {
    each_counter(Counters{seed, stream, step, positions, quads, rows, canvas, count}, out, log_exponential);
}

void scan_block(const Scan *scan, int is_bf16) {
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < scan->rows * scan->canvas; at++) {
        if (is_bf16) scan_position<Bf16>(*scan, at);
        else scan_position<float>(*scan, at);
    }
}
}
