// Matrix products on CPUs with AVX-512, compiled on the user's machine at first use.
//
// y[m, n] = sum over k of x[m, k] * w[n, k], with w = (code - zero) * scale. All sums have a fixed order, which depends
// neither on the number of rows nor on the number of threads. So a row's result does not depend on other rows.
//
// `multiply` (VNNI): x is quantized to int8 with one scale per 256 neighbours. Sums under one scale are sums of integers,
// hence exact. Each row of the weight is unpacked once into buffers that fit into the L1 cache, then multiplied with all
// rows of x.
// `multiply_float`: x stays in float32. Each row of the weight is decoded to float32, to the same numbers as `dequantize`
// of quantized_tensor.py gives. Also for plain float32 and bfloat16 weights.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int CHUNK = 256;     // codes multiplied at once: four registers of bytes
constexpr int MAX_CHUNKS = 64; // rows have at most 16,384 numbers
constexpr int M_BLOCK = 8;      // rows of x per tile
constexpr int N_BLOCK = 2;      // rows of w per tile: 8 x 2 sums in registers
constexpr int N_TASK = 64;      // rows of w per task of a thread
constexpr int MAX_INNER = 16384;
constexpr int ROWS = 6, COLUMNS = 4;  // of x and w per tile in float32: 24 sums in registers
constexpr int PANEL = 192;      // rows of x that stay in the L2 cache

enum Kind { INT4 = 0, INT8 = 1, FLOAT4 = 2, FLOAT8 = 3, PLAIN32 = 4, PLAIN16 = 5 };  // PLAIN16: bfloat16
enum ScaleType { F32 = 0, BF16 = 1, F16 = 2, F8 = 3 };

struct Weight {
    const uint8_t *codes;
    const void *scale;
    const uint8_t *zero;  // null: 8 for INT4, 0 for the others
    const float *outer;   // global scale per row; null: none
    int kind, scale_type, outer_divides;
    int64_t out, inner, groups;
};

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float float_of_e4m3(uint8_t bits) {  // no infinities; subnormals below 2^-6. Scales have no sign.
    int exponent = (bits >> 3) & 15, mantissa = bits & 7;
    return exponent ? float_of((uint32_t(exponent + 120) << 23) | (uint32_t(mantissa) << 20)) : mantissa * 0.001953125f;
}

inline float float8_of(uint8_t bits) { return bits & 128 ? -float_of_e4m3(bits & 127) : float_of_e4m3(bits); }

// The scales of row n, including its global scale.
void read_scales(const Weight &w, int64_t n, float *to) {
    const int64_t from = n * w.groups;
    for (int64_t g = 0; g < w.groups; g++) {
        switch (w.scale_type) {
            case F32: to[g] = static_cast<const float *>(w.scale)[from + g]; break;
            case BF16: to[g] = float_of(uint32_t(static_cast<const uint16_t *>(w.scale)[from + g]) << 16); break;
            case F16: to[g] = _cvtsh_ss(static_cast<const uint16_t *>(w.scale)[from + g]); break;
            default: to[g] = float_of_e4m3(static_cast<const uint8_t *>(w.scale)[from + g]);
        }
    }
    if (w.outer && w.outer_divides) for (int64_t g = 0; g < w.groups; g++) to[g] /= w.outer[n];
    if (w.outer && !w.outer_divides) for (int64_t g = 0; g < w.groups; g++) to[g] *= w.outer[n];
}

#ifdef __AVX512VNNI__

// One unpacked row of w.
struct Row {
    alignas(64) int8_t codes[MAX_CHUNKS][4][64];
    alignas(64) float scale[MAX_CHUNKS][16];
    alignas(64) int32_t start[MAX_CHUNKS][16];  // correction for the offset 128 of the unsigned x
};

const int8_t FLOAT4_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline __mmask64 bytes_left(int64_t left) { return left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0; }

// Unpack row n. With 4-bit codes, the 32-bit lanes of the four registers hold 16 neighbours, which are eight bytes in
// memory: register 0 has the lower halves of the first four bytes, register 1 their upper halves, registers 2 and 3
// those of the last four. `round_rows` gives x the same order. With 8-bit codes the order is that of memory.
void unpack(const Weight &w, int64_t n, int chunks, Row &row) {
    const int64_t row_bytes = w.kind == INT8 ? w.inner : w.inner / 2;
    const uint8_t *codes = w.codes + n * row_bytes;
    const int64_t group_len = w.inner / w.groups;
    float scales[MAX_CHUNKS * 16 + 16];
    read_scales(w, n, scales);
    if (w.kind == FLOAT4) for (int64_t g = 0; g < w.groups; g++) scales[g] *= 0.5f;  // the table has twice the numbers
    memset(scales + w.groups, 0, 64);  // read past the end, where all codes are zero
    const __m512i low = _mm512_set1_epi8(15), ones = _mm512_set1_epi8(1), middle = _mm512_set1_epi8(8);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(FLOAT4_TWICE)));
    const bool one_scale = w.groups == 1 || group_len % CHUNK == 0;
    const __m512i group_of_lane =
        _mm512_srli_epi32(_mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240),
                          one_scale ? 0 : __builtin_ctz(unsigned(group_len)));
    for (int c = 0; c < chunks; c++) {
        __m512i part[4];
        if (w.kind == INT8) {
            for (int v = 0; v < 4; v++) part[v] = _mm512_maskz_loadu_epi8(bytes_left(row_bytes - c * 256 - v * 64), codes + c * 256 + v * 64);
        } else {
            const int64_t left = row_bytes - int64_t(c) * 128;
            __m512i a = _mm512_maskz_loadu_epi8(bytes_left(left), codes + c * 128);
            __m512i b = _mm512_maskz_loadu_epi8(bytes_left(left - 64), codes + c * 128 + 64);
            __m512i halves[2] = {_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)};
            for (int h = 0; h < 2; h++) {
                part[2 * h] = _mm512_and_si512(halves[h], low);
                part[2 * h + 1] = _mm512_and_si512(_mm512_srli_epi16(halves[h], 4), low);
            }
            for (int v = 0; v < 4; v++) {
                if (w.kind == FLOAT4) part[v] = _mm512_shuffle_epi8(table, part[v]);
                else if (!w.zero) part[v] = _mm512_sub_epi8(part[v], middle);
            }
            if (w.zero) {
                alignas(64) int32_t zeros[16];
                for (int lane = 0; lane < 16; lane++) {
                    int64_t at = int64_t(c) * CHUNK + lane * 16;
                    zeros[lane] = at < w.inner ? 0x01010101 * w.zero[n * w.groups + at / group_len] : 0;
                }
                for (int v = 0; v < 4; v++) part[v] = _mm512_sub_epi8(part[v], _mm512_load_si512(zeros));
            }
        }
        __m512i sums = _mm512_setzero_si512();
        for (int v = 0; v < 4; v++) {
            _mm512_store_si512(row.codes[c][v], part[v]);
            sums = _mm512_dpbusd_epi32(sums, ones, part[v]);
        }
        _mm512_store_si512(row.start[c], _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sums), 7));
        const int64_t at = int64_t(c) * CHUNK;
        if (one_scale) _mm512_store_ps(row.scale[c], _mm512_set1_ps(scales[at / group_len]));
        else _mm512_store_ps(row.scale[c], _mm512_permutexvar_ps(group_of_lane, _mm512_loadu_ps(scales + at / group_len)));
    }
}

// y = x w^T for a tile of ROWS rows of x and COLUMNS rows of w.
template <int ROWS, int COLUMNS>
void multiply_tile(const uint8_t *x, const float *x_scale, int64_t x_bytes, int chunks, const Row *rows, float *y, int64_t stride) {
    __m512 sum[ROWS][COLUMNS];
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < COLUMNS; n++) sum[m][n] = _mm512_setzero_ps();
    for (int c = 0; c < chunks; c++) {
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const uint8_t *here = x + m * x_bytes + c * CHUNK;
            const __m512i bytes[4] = {_mm512_loadu_si512(here), _mm512_loadu_si512(here + 64),
                                      _mm512_loadu_si512(here + 128), _mm512_loadu_si512(here + 192)};
            const __m512 scale = _mm512_set1_ps(x_scale[m * chunks + c]);
#pragma GCC unroll 2
            for (int n = 0; n < COLUMNS; n++) {
                __m512i whole = _mm512_load_si512(rows[n].start[c]);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) whole = _mm512_dpbusd_epi32(whole, bytes[v], _mm512_load_si512(rows[n].codes[c][v]));
                __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_load_ps(rows[n].scale[c]));
                sum[m][n] = _mm512_fmadd_ps(scaled, scale, sum[m][n]);
            }
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < COLUMNS; n++) y[m * stride + n] = _mm512_reduce_add_ps(sum[m][n]);
}

// The same for `count` rows of x, 1 to 8.
template <int COLUMNS>
void multiply_rows(int count, const uint8_t *x, const float *x_scale, int64_t x_bytes, int chunks, const Row *rows, float *y, int64_t stride) {
    switch (count) {
        case 1: return multiply_tile<1, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        case 2: return multiply_tile<2, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        case 3: return multiply_tile<3, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        case 4: return multiply_tile<4, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        case 5: return multiply_tile<5, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        case 6: return multiply_tile<6, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        case 7: return multiply_tile<7, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
        default: return multiply_tile<8, COLUMNS>(x, x_scale, x_bytes, chunks, rows, y, stride);
    }
}

#endif

// Decode row n of w to float32, zeros up to the next multiple of 16. A group has a multiple of 16 numbers, or is the row.
void decode(const Weight &w, int64_t n, float *to) {
    const int64_t padded = (w.inner + 15) / 16 * 16;
    if (w.kind == PLAIN16) {
        const uint16_t *from = reinterpret_cast<const uint16_t *>(w.codes) + n * w.inner;
        for (int64_t k = 0; k < w.inner; k++) to[k] = float_of(uint32_t(from[k]) << 16);
        for (int64_t k = w.inner; k < padded; k++) to[k] = 0;
        return;
    }
    const int64_t row_bytes = w.kind == INT4 || w.kind == FLOAT4 ? w.inner / 2 : w.inner;
    const uint8_t *codes = w.codes + n * row_bytes;
    const int64_t group_len = w.inner / w.groups;
    float scales[MAX_INNER / 16];
    read_scales(w, n, scales);
    const __m512 float4 = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    for (int64_t g = 0; g < w.groups; g++) {
        const __m512 scale = _mm512_set1_ps(scales[g]);
        const __m512i zero = _mm512_set1_epi32(w.kind != INT4 ? 0 : w.zero ? w.zero[n * w.groups + g] : 8);
        const int64_t end = (g + 1) * group_len;
        for (int64_t k = g * group_len; k < end; k += 16) {
            const int count = int(end - k < 16 ? end - k : 16);
            __m512 numbers;
            if (w.kind == FLOAT8) {
                alignas(64) float plain[16];
                for (int i = 0; i < 16; i++) plain[i] = i < count ? float8_of(codes[k + i]) : 0;
                numbers = _mm512_load_ps(plain);
            } else {
                __m128i bytes;
                if (w.kind == INT8) {
                    bytes = _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), codes + k);
                } else {
                    const __m128i packed = _mm_maskz_loadu_epi8(__mmask16((1u << (count / 2)) - 1), codes + k / 2);
                    const __m128i low = _mm_set1_epi8(15);
                    bytes = _mm_unpacklo_epi8(_mm_and_si128(packed, low), _mm_and_si128(_mm_srli_epi16(packed, 4), low));
                }
                const __m512i wide = w.kind == INT8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
                numbers = w.kind == FLOAT4 ? _mm512_permutexvar_ps(wide, float4) : _mm512_cvtepi32_ps(_mm512_sub_epi32(wide, zero));
            }
            _mm512_mask_storeu_ps(to + k, __mmask16((1u << count) - 1), _mm512_mul_ps(numbers, scale));
        }
    }
    for (int64_t k = w.inner; k < padded; k++) to[k] = 0;
}

// The sum of each of four registers: transposed while they are added, in half the instructions of four sums alone.
inline __m128 sums_of_four(const __m512 *x) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// y = x w^T for `M` rows of x and `N` decoded rows of w.
template <int M, int N>
void float_tile(const float *x, int64_t inner, const float *const *rows, float *y, int64_t stride) {
    __m512 sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = _mm512_setzero_ps();
    const int64_t whole = inner / 16 * 16;
    for (int64_t k = 0; k < whole; k += 16) {
        __m512 part[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) part[n] = _mm512_loadu_ps(rows[n] + k);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const __m512 own = _mm512_loadu_ps(x + m * inner + k);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[m][n] = _mm512_fmadd_ps(own, part[n], sum[m][n]);
        }
    }
    if (whole < inner) {
        const __mmask16 left = __mmask16((1u << (inner - whole)) - 1);
        for (int m = 0; m < M; m++) {
            const __m512 own = _mm512_maskz_loadu_ps(left, x + m * inner + whole);
            for (int n = 0; n < N; n++)
                sum[m][n] = _mm512_fmadd_ps(own, _mm512_maskz_loadu_ps(left, rows[n] + whole), sum[m][n]);
        }
    }
    for (int m = 0; m < M; m++) {
        if constexpr (N == 4) _mm_storeu_ps(y + m * stride, sums_of_four(sum[m]));
        else for (int n = 0; n < N; n++) y[m * stride + n] = _mm512_reduce_add_ps(sum[m][n]);
    }
}

template <int N>
void float_rows(int count, const float *x, int64_t inner, const float *const *rows, float *y, int64_t stride) {
    switch (count) {
        case 1: return float_tile<1, N>(x, inner, rows, y, stride);
        case 2: return float_tile<2, N>(x, inner, rows, y, stride);
        case 3: return float_tile<3, N>(x, inner, rows, y, stride);
        case 4: return float_tile<4, N>(x, inner, rows, y, stride);
        case 5: return float_tile<5, N>(x, inner, rows, y, stride);
        default: return float_tile<6, N>(x, inner, rows, y, stride);
    }
}

}  // namespace

extern "C" {

#ifdef __AVX512VNNI__

// Quantize x [m, inner] fp32 to bytes with offset 128 [m, chunks * 256] and one scale per chunk [m, chunks].
// in_order: keep the order of memory, for 8-bit weights; else use the order of `unpack` for 4-bit weights.
void round_rows(const float *x, int64_t rows, int64_t inner, int in_order, uint8_t *bytes, float *scales) {
    const int chunks = int((inner + CHUNK - 1) / CHUNK);
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < rows; m++) {
        for (int c = 0; c < chunks; c++) {
            const float *here = x + m * inner + int64_t(c) * CHUNK;
            int count = int(inner - int64_t(c) * CHUNK < CHUNK ? inner - int64_t(c) * CHUNK : CHUNK);
            float top = 0;
            for (int i = 0; i < count; i++) {
                float size = here[i] < 0 ? -here[i] : here[i];
                top = size > top ? size : top;
            }
            float scale = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
            scales[m * chunks + c] = scale;
            uint8_t *to = bytes + (m * chunks + c) * CHUNK;
            uint8_t plain[CHUNK];
            for (int i = 0; i < count; i++) plain[i] = uint8_t(int(__builtin_nearbyintf(here[i] * inverse)) + 128);
            for (int i = count; i < CHUNK; i++) plain[i] = 128;
            if (in_order) {
                memcpy(to, plain, CHUNK);
                continue;
            }
            for (int lane = 0; lane < 16; lane++)
                for (int v = 0; v < 4; v++)
                    for (int i = 0; i < 4; i++) to[v * 64 + lane * 4 + i] = plain[lane * 16 + v / 2 * 8 + i * 2 + v % 2];
        }
    }
}

// y [rows of x, out] fp32. Expert e owns the rows of x from ends[e - 1] to ends[e]; a plain matrix is one expert.
void multiply(const uint8_t *x, const float *x_scale, const int32_t *ends, int64_t experts, const uint8_t *codes,
              const void *scale, const uint8_t *zero, const float *outer, int kind, int scale_type, int outer_divides,
              int64_t out, int64_t inner, int64_t groups, float *y) {
    const int chunks = int((inner + CHUNK - 1) / CHUNK);
    const int64_t x_bytes = int64_t(chunks) * CHUNK;
    const int64_t row_bytes = kind == INT8 ? inner : inner / 2;
    const int64_t scale_bytes = scale_type == F32 ? 4 : scale_type == F8 ? 1 : 2;
    const int64_t tasks = (out + N_TASK - 1) / N_TASK;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < experts * tasks; task++) {
        const int64_t e = task / tasks, from = task % tasks * N_TASK;
        const int64_t begin = e ? ends[e - 1] : 0, end = ends[e];
        if (begin == end) continue;
        const int64_t to = from + N_TASK < out ? from + N_TASK : out;
        Weight w{codes + e * out * row_bytes,
                 static_cast<const char *>(scale) + e * out * groups * scale_bytes,
                 zero ? zero + e * out * groups : nullptr,
                 outer ? outer + e * out : nullptr,
                 kind, scale_type, outer_divides, out, inner, groups};
        static thread_local Row rows[N_BLOCK];
        for (int64_t n = from; n < to; n += N_BLOCK) {
            const int columns = int(to - n < N_BLOCK ? to - n : N_BLOCK);
            for (int i = 0; i < columns; i++) unpack(w, n + i, chunks, rows[i]);
            for (int64_t m = begin; m < end; m += M_BLOCK) {
                const int count = int(end - m < M_BLOCK ? end - m : M_BLOCK);
                const uint8_t *some = x + m * x_bytes;
                const float *some_scales = x_scale + m * chunks;
                if (columns == 2) multiply_rows<2>(count, some, some_scales, x_bytes, chunks, rows, y + m * out + n, out);
                else multiply_rows<1>(count, some, some_scales, x_bytes, chunks, rows, y + m * out + n, out);
            }
        }
    }
}

#endif

// The same with x [m, inner] in float32, and for every kind of weight. `scale` is null for plain weights.
void multiply_float(const float *x, const int32_t *ends, int64_t experts, const uint8_t *codes, const void *scale,
                    const uint8_t *zero, const float *outer, int kind, int scale_type, int outer_divides, int64_t out,
                    int64_t inner, int64_t groups, float *y) {
    const int64_t row_bytes = kind == PLAIN32 ? inner * 4 : kind == PLAIN16 ? inner * 2 : kind == INT4 || kind == FLOAT4 ? inner / 2 : inner;
    const int64_t scale_bytes = scale_type == F32 ? 4 : scale_type == F8 ? 1 : 2;
    const int64_t tasks = (out + N_TASK - 1) / N_TASK;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < experts * tasks; task++) {
        const int64_t e = task / tasks, from = task % tasks * N_TASK;
        const int64_t begin = e ? ends[e - 1] : 0, end = ends[e];
        const int64_t to = from + N_TASK < out ? from + N_TASK : out;
        Weight w{codes + e * out * row_bytes,
                 scale ? static_cast<const char *>(scale) + e * out * groups * scale_bytes : nullptr,
                 zero ? zero + e * out * groups : nullptr,
                 outer ? outer + e * out : nullptr,
                 kind, scale_type, outer_divides, out, inner, groups};
        alignas(64) static thread_local float decoded[COLUMNS][MAX_INNER];
        const float *rows[COLUMNS];
        for (int64_t panel = begin; panel < end; panel += PANEL) {
            const int64_t panel_end = panel + PANEL < end ? panel + PANEL : end;
            for (int64_t n = from; n < to; n += COLUMNS) {
                const int columns = int(to - n < COLUMNS ? to - n : COLUMNS);
                for (int i = 0; i < columns; i++) {
                    rows[i] = decoded[i];
                    if (kind == PLAIN32) rows[i] = reinterpret_cast<const float *>(w.codes) + (n + i) * inner;
                    else decode(w, n + i, decoded[i]);
                }
                for (int64_t m = panel; m < panel_end; m += ROWS) {
                    const int count = int(panel_end - m < ROWS ? panel_end - m : ROWS);
                    const float *some = x + m * inner;
                    float *here = y + m * out + n;
                    if (columns == 4) float_rows<4>(count, some, inner, rows, here, out);
                    else for (int i = 0; i < columns; i++) float_rows<1>(count, some, inner, rows + i, here + i, out);
                }
            }
        }
    }
}


}  // extern "C"
