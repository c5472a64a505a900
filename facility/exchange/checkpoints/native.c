/* The loops that dominate averaging and the smaller messages, over numpy's buffers: one pass each, in a core's cache.
 *
 * facility/exchange/checkpoints/native.py compiles this where a C compiler is found and checks nothing twice: callers pass arrays of
 * the right length. Elementwise results are those of the numpy code beside each caller, bit for bit: IEEE operations in
 * the same order, never contracted (-ffp-contract=off), never reassociated. Sums of products have an order of their own,
 * fixed here, the same on every machine.
 */
#ifdef __F16C__
#include <immintrin.h>
#endif
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { BF16 = 0, F16 = 1, F32 = 2, INT8 = 3, INT4 = 4, SPARSE = 5, PLACED = 6 }; /* from INT8 on: differences to a base */
enum { RUN = 512, LANES = 8, PART = 65536, SPARE = 16, INT8_BLOCK = 256, INT4_BLOCK = 64, INT4_LEVELS = 8 };
enum { CHUNK = 4096, KEPT = 88, LOW = 5 }; /* of PLACED: codecs/sparseloco.py */

/* Unaligned vectors as wide as the registers, and how many rows of how many sums fit into these. */
#if defined __AVX512F__
enum { WIDTH = 16, ROWS = 4, COLUMNS = 4 };
#elif defined __AVX__
enum { WIDTH = 8, ROWS = 2, COLUMNS = 4 };
#else
enum { WIDTH = 4, ROWS = 4, COLUMNS = 4 };
#endif
typedef float lanes __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float eight_floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef double eight_doubles __attribute__((vector_size(64), aligned(8), may_alias));
typedef double four_doubles __attribute__((vector_size(32), aligned(8), may_alias));
typedef double two_doubles __attribute__((vector_size(16), aligned(8), may_alias));

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Element `start` and the n - 1 after it, stored as `kind`, to float32. */
static void widen(const void *stored, int kind, int64_t start, int64_t n, float *restrict out)
{
    if (kind == BF16) {
        const uint16_t *restrict raw = (const uint16_t *)stored + start;
        for (int64_t i = 0; i < n; i++)
            out[i] = from_bits((uint32_t)raw[i] << 16);
    } else if (kind == F16) {
        const uint16_t *restrict raw = (const uint16_t *)stored + start;
        int64_t i = 0;
#ifdef __F16C__
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(raw + i))));
#endif
        for (; i < n; i++) {
            /* The exponent's bias grows by 112: an exact product, subnormal numbers included. */
            float magnitude = from_bits((uint32_t)(raw[i] & 0x7FFF) << 13) * 0x1p112f;
            uint32_t special = (raw[i] & 0x7C00) == 0x7C00 ? 0x7F800000u : 0;
            out[i] = from_bits(to_bits(magnitude) | special | (uint32_t)(raw[i] & 0x8000) << 16);
        }
    } else {
        memcpy(out, (const float *)stored + start, 4 * n);
    }
}

/* Differences as whole numbers times the scale of their block: one byte each, or half a one and bfloat16 scales. */
static inline __attribute__((always_inline)) void int8_values(int64_t n, int64_t block, const int8_t *restrict q,
                                                              const float *restrict scales, float *restrict out)
{
    for (int64_t start = 0; start < n; start += block) {
        int64_t count = n - start < block ? n - start : block;
        float scale = *scales++;
        for (int64_t i = 0; i < count; i++)
            out[start + i] = (float)q[start + i] * scale;
    }
}

static inline __attribute__((always_inline)) void int4_values(int64_t n, int64_t block, float levels,
                                                              const uint8_t *restrict q, const uint16_t *restrict scales,
                                                              float *restrict out)
{
    uint8_t nibbles[RUN]; /* block is at most RUN */
    for (int64_t start = 0; start < n; start += block) {
        int64_t count = n - start < block ? n - start : block, pairs = count / 2;
        const uint8_t *restrict two = q + start / 2;
        float scale = from_bits((uint32_t)*scales++ << 16);
        for (int64_t i = 0; i < pairs; i++) {
            nibbles[2 * i] = two[i] & 15;
            nibbles[2 * i + 1] = two[i] >> 4;
        }
        if (count & 1)
            nibbles[count - 1] = two[pairs] & 15;
        for (int64_t i = 0; i < count; i++)
            out[start + i] = ((float)nibbles[i] - levels) * scale;
    }
}

/* What belongs to the bits of one part that say which of its values are kept. */
struct marked {
    const float *levels;
    const uint8_t *codes; /* four bits for each kept value: a level, and its sign in the highest */
    int64_t taken;        /* of them, by the values before */
};

/* How many of the first n bits are set. Those after them, in the last byte, are not. */
static inline __attribute__((always_inline)) int64_t bits_in(int64_t n, const uint8_t *restrict bits)
{
    int64_t found = 0, start = 0;
    for (; start + 64 <= n; start += 64, bits += 8) {
        uint64_t eight;
        memcpy(&eight, bits, 8);
        found += __builtin_popcountll(eight);
    }
    for (; start < n; start += 8)
        found += __builtin_popcount(*bits++);
    return found;
}

/* n values, of which those are in `reached` from its first on whose bit is set in `kept`; the others are 0. Returns how many. */
static inline __attribute__((always_inline)) int64_t spread(int64_t n, const uint8_t *restrict kept,
                                                            const float *restrict reached, float *restrict out)
{
    const float *next = reached;
    int64_t start = 0;
#ifdef __AVX512F__
    for (; start + 16 <= n; start += 16, kept += 2) {
        uint16_t mask;
        memcpy(&mask, kept, 2);
        _mm512_storeu_ps(out + start, _mm512_maskz_expandloadu_ps(mask, next));
        next += __builtin_popcount(mask);
    }
#endif
    for (; start < n; start += 8, kept++)
        for (int64_t i = 0; i < (n - start < 8 ? n - start : 8); i++) {
            unsigned bit = *kept >> i & 1;
            out[start + i] = bit ? *next : 0;
            next += bit;
        }
    return next - reached;
}

/* The next n values of a part, at most RUN and a multiple of 8 but for its last. */
static void marked_values(int64_t n, const uint8_t *restrict kept, struct marked *part, float *restrict out)
{
    float table[16], reached[RUN + 2];
    for (int code = 0; code < 16; code++)
        table[code] = code & 8 ? -part->levels[code & 7] : part->levels[code & 7];
    const uint8_t *restrict codes = part->codes + part->taken / 2;
    const int64_t odd = part->taken & 1, pairs = (odd + bits_in(n, kept) + 1) / 2;
    int64_t i = 0;
#ifdef __AVX512F__
    const __m512 every = _mm512_loadu_ps(table);
    const __m128i lower = _mm_set1_epi8(15);
    for (; i + 8 <= pairs; i += 8) {
        __m128i two = _mm_loadl_epi64((const __m128i *)(codes + i));
        __m128i each = _mm_unpacklo_epi8(_mm_and_si128(two, lower), _mm_and_si128(_mm_srli_epi16(two, 4), lower));
        _mm512_storeu_ps(reached + 2 * i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(each), every));
    }
#endif
    for (; i < pairs; i++) {
        reached[2 * i] = table[codes[i] & 15];
        reached[2 * i + 1] = table[codes[i] >> 4];
    }
    part->taken += spread(n, kept, reached + odd, out);
}

/* Where the four strings of bits of a chunk of `count` values begin in its code, and its bytes last. */
static inline __attribute__((always_inline)) int64_t streams_of(int64_t count, int64_t *begins)
{
    const int64_t kept = count < KEPT ? count : KEPT;
    begins[0] = 0;
    begins[1] = (kept + ((count - 1) >> LOW) + 1 + 7) / 8;
    begins[2] = begins[1] + (LOW * kept + 7) / 8;
    begins[3] = begins[2] + (kept + 7) / 8;
    begins[4] = begins[3] + (kept + 7) / 8;
    return kept;
}

/* The place of kept value number `found` of a chunk, whose high bits have their bit at `at`; `low`: where the low bits begin. */
static inline __attribute__((always_inline)) int64_t place_of(const uint8_t *code, int64_t low, int64_t at, int64_t found)
{
    const int64_t bit = LOW * found;
    uint16_t two;
    memcpy(&two, code + low + bit / 8, 2); /* at least a byte of signs lies behind */
    return (at - found) << LOW | (two >> bit % 8 & ((1 << LOW) - 1));
}

/* Whether the places of a chunk are fit to be used: 0, or 1 for other than as many as it has, 2 for some that do not increase or
 * lie past its end. */
static int odd_places(const uint8_t *restrict code, int64_t count)
{
    int64_t begins[5], found = 0, last = -1;
    const int64_t kept = streams_of(count, begins);
    int odd = 0;
    for (int64_t byte = 0; byte < begins[1]; byte++)
        for (unsigned bits = code[byte]; bits; bits &= bits - 1, found++) {
            if (found == kept)
                return 1;
            const int64_t place = place_of(code, begins[1], 8 * byte + __builtin_ctz(bits), found);
            odd |= place <= last || place >= count;
            last = place;
        }
    return found != kept ? 1 : odd ? 2 : 0;
}

/* The n values from `from` on of a chunk of `count`: 0 but for what is kept. */
static void placed_values(const uint8_t *restrict code, const uint16_t *restrict levels, int64_t count, int64_t from, int64_t n,
                          float *restrict out)
{
    int64_t begins[5], found = 0;
    streams_of(count, begins);
    memset(out, 0, 4 * n);
    for (int64_t byte = 0; byte < begins[1]; byte++)
        for (unsigned bits = code[byte]; bits; bits &= bits - 1, found++) {
            const int64_t place = place_of(code, begins[1], 8 * byte + __builtin_ctz(bits), found);
            if (place >= from + n)
                return;
            if (place < from)
                continue;
            const unsigned larger = code[begins[3] + found / 8] >> found % 8 & 1,
                           sign = code[begins[2] + found / 8] >> found % 8 & 1;
            out[place - from] = from_bits((uint32_t)levels[larger] << 16 ^ (uint32_t)sign << 31);
        }
}

/* The n values from `start` on, all of one chunk, of `end` values in chunks. */
static void chunk_values(const uint8_t *code, const uint16_t *levels, int64_t start, int64_t n, int64_t end, float *out)
{
    int64_t begins[5];
    const int64_t chunk = start / CHUNK, first = chunk * CHUNK, count = end - first < CHUNK ? end - first : CHUNK;
    streams_of(CHUNK, begins);
    placed_values(code + chunk * begins[4], levels + 2 * chunk, count, start - first, n, out);
}

/* update - base for the n elements from `start`, and its share of the weighted sum (weight NULL: no sum is wanted;
 * `first`: the sum begins here). `scales`: of a difference, which is added to the base and taken off again as if the update had
 * been stored. `end`: of what is stored. */
static void step_from(const float *restrict base, const void *stored, const void *scales, int kind, int64_t start, int64_t n,
                      int64_t end, const float *weight, int first, float *restrict step, float *restrict total)
{
    if (kind == BF16) {
        const uint16_t *restrict raw = (const uint16_t *)stored + start;
        for (int64_t i = 0; i < n; i++)
            step[i] = from_bits((uint32_t)raw[i] << 16) - base[i];
    } else if (kind >= INT8) {
        if (kind == INT8)
            int8_values(n, INT8_BLOCK, (const int8_t *)stored + start, (const float *)scales + start / INT8_BLOCK, step);
        else if (kind == SPARSE)
            marked_values(n, (const uint8_t *)stored + start / 8, (struct marked *)scales, step);
        else if (kind == PLACED)
            chunk_values((const uint8_t *)stored, (const uint16_t *)scales, start, n, end, step);
        else
            int4_values(n, INT4_BLOCK, INT4_LEVELS, (const uint8_t *)stored + start / 2,
                        (const uint16_t *)scales + start / INT4_BLOCK, step);
        for (int64_t i = 0; i < n; i++)
            step[i] = base[i] + step[i] - base[i];
    } else {
        widen(stored, kind, start, n, step);
        for (int64_t i = 0; i < n; i++)
            step[i] -= base[i];
    }
    if (weight && first)
        for (int64_t i = 0; i < n; i++)
            total[i] = step[i] * *weight;
    else if (weight)
        for (int64_t i = 0; i < n; i++)
            total[i] += step[i] * *weight;
}

/* Steps of four updates of one kind, and their share of the weighted sum, which stays in registers: the same operations
 * in the same order as `step_from` one by one. KEPT: the steps are stored, `stride` apart. SUMMED: the sum is wanted. `scales`:
 * of the four, where VALUE asks for them. */
#define FOUR(NAME, STORED, VALUE, KEPT, SUMMED)                                                                         \
    static void NAME(const float *restrict base, const STORED *restrict a, const STORED *restrict b,                    \
                     const STORED *restrict c, const STORED *restrict d, const float *restrict scales,                  \
                     const float *weights, int64_t n, int first, float *restrict steps, int64_t stride,                 \
                     float *restrict total)                                                                             \
    {                                                                                                                   \
        const float one = SUMMED ? weights[0] : 0, two = SUMMED ? weights[1] : 0, three = SUMMED ? weights[2] : 0,      \
                    four = SUMMED ? weights[3] : 0;                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                                               \
            float p = VALUE(a[i], base[i], scales[0]) - base[i], q = VALUE(b[i], base[i], scales[1]) - base[i],         \
                  r = VALUE(c[i], base[i], scales[2]) - base[i], s = VALUE(d[i], base[i], scales[3]) - base[i];         \
            if (KEPT) {                                                                                                 \
                steps[i] = p;                                                                                           \
                steps[i + stride] = q;                                                                                  \
                steps[i + 2 * stride] = r;                                                                              \
                steps[i + 3 * stride] = s;                                                                              \
            }                                                                                                           \
            if (SUMMED) {                                                                                               \
                float sum = first ? p * one : total[i] + p * one;                                                       \
                sum += q * two;                                                                                         \
                sum += r * three;                                                                                       \
                total[i] = sum + s * four;                                                                              \
            }                                                                                                           \
        }                                                                                                               \
    }
#define UPPER_HALF(stored, base, scale) from_bits((uint32_t)(stored) << 16)
#define AS_STORED(stored, base, scale) (stored)
#define ADDED(stored, base, scale) ((base) + (float)(stored) * (scale))
FOUR(sum_bf16, uint16_t, UPPER_HALF, 0, 1)
FOUR(keep_bf16, uint16_t, UPPER_HALF, 1, 0)
FOUR(both_bf16, uint16_t, UPPER_HALF, 1, 1)
FOUR(sum_f32, float, AS_STORED, 0, 1)
FOUR(keep_f32, float, AS_STORED, 1, 0)
FOUR(both_f32, float, AS_STORED, 1, 1)
FOUR(sum_int8, int8_t, ADDED, 0, 1)
FOUR(keep_int8, int8_t, ADDED, 1, 0)
FOUR(both_int8, int8_t, ADDED, 1, 1)

/* The same of k updates, for the n elements from `start`, a multiple of RUN; not wanted: `kept` 0, weights NULL.
 * steps: k rows, `stride` apart; n values where they are not wanted. */
static void steps_of(const float *base, const void *const *updates, const void *const *scales, const int *kinds, int64_t k,
                     int64_t start, int64_t n, int64_t end, const float *weights, int kept, float *steps, int64_t stride,
                     float *total)
{
    int64_t row = 0;
    while (row < k) {
        int alike = k - row >= 4 && kinds[row] == kinds[row + 1] && kinds[row] == kinds[row + 2] &&
                    kinds[row] == kinds[row + 3];
        float *step = kept ? steps + row * stride : steps;
        const float *w = weights ? weights + row : 0;
        if (alike && kinds[row] == BF16) {
            const uint16_t *const *raw = (const uint16_t *const *)updates + row;
            (kept ? w ? both_bf16 : keep_bf16 : sum_bf16)(base, raw[0] + start, raw[1] + start, raw[2] + start,
                                                          raw[3] + start, 0, w, n, row == 0, step, stride, total);
            row += 4;
        } else if (alike && kinds[row] == F32) {
            const float *const *raw = (const float *const *)updates + row;
            (kept ? w ? both_f32 : keep_f32 : sum_f32)(base, raw[0] + start, raw[1] + start, raw[2] + start,
                                                       raw[3] + start, 0, w, n, row == 0, step, stride, total);
            row += 4;
        } else if (alike && kinds[row] == INT8) {
            const int8_t *const *raw = (const int8_t *const *)updates + row;
            const float *const *every = (const float *const *)scales + row;
            for (int64_t at = 0; at < n; at += INT8_BLOCK) {
                int64_t from = start + at, block = from / INT8_BLOCK, count = n - at < INT8_BLOCK ? n - at : INT8_BLOCK;
                const float four[4] = {every[0][block], every[1][block], every[2][block], every[3][block]};
                (kept ? w ? both_int8 : keep_int8 : sum_int8)(base + at, raw[0] + from, raw[1] + from, raw[2] + from,
                                                              raw[3] + from, four, w, count, row == 0, step + at, stride,
                                                              total + at);
            }
            row += 4;
        } else {
            step_from(base, updates[row], scales[row], kinds[row], start, n, end, w, row == 0, step, total);
            row++;
        }
    }
}

/* The sum of 2 LANES lanes: those of both halves in float, then a tree in double. */
static inline __attribute__((always_inline)) double sum_of_lanes(const float *sums)
{
    eight_floats both = *(const eight_floats *)sums + *(const eight_floats *)(sums + LANES);
    double wide[LANES] __attribute__((aligned(64)));
#if defined __clang__ || __GNUC__ >= 9
    *(eight_doubles *)wide = __builtin_convertvector(both, eight_doubles);
#else
    for (int lane = 0; lane < LANES; lane++)
        wide[lane] = both[lane];
#endif
    four_doubles four = *(const four_doubles *)wide + *(const four_doubles *)(wide + 4);
    *(four_doubles *)wide = four;
    two_doubles two = *(const two_doubles *)wide + *(const two_doubles *)(wide + 2);
    return two[0] + two[1];
}

/* Inner products of `rows` rows with `columns` others, or (`diagonal`) of rows with each other, added to gram: at most ROWS times
 * COLUMNS, so that a value is loaded once for several. Lane l of 2 LANES sums the values l, l + 2 LANES and so on, whatever tile
 * a pair falls into and however wide the registers are. Inlined with all counts but n and k constant. */
static inline __attribute__((always_inline)) void tile(const float *x, const float *y, int64_t stride, int rows, int columns,
                                                       int diagonal, int64_t n, int64_t k, double *gram)
{
    float sums[ROWS * COLUMNS][2 * LANES] __attribute__((aligned(64)));
    int64_t whole = n - n % (2 * LANES);
    for (int part = 0; part < 2 * LANES; part += WIDTH) {
        lanes sum[ROWS * COLUMNS];
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < (diagonal ? row + 1 : columns); column++)
                sum[row * COLUMNS + column] = (lanes){0};
        for (int64_t i = part; i < whole; i += 2 * LANES) {
            lanes b[COLUMNS];
            for (int column = 0; column < columns; column++)
                b[column] = *(const lanes *)(y + column * stride + i);
            for (int row = 0; row < rows; row++) {
                lanes a = diagonal ? b[row] : *(const lanes *)(x + row * stride + i);
                for (int column = 0; column < (diagonal ? row + 1 : columns); column++)
                    sum[row * COLUMNS + column] += a * b[column];
            }
        }
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < (diagonal ? row + 1 : columns); column++)
                *(lanes *)(sums[row * COLUMNS + column] + part) = sum[row * COLUMNS + column];
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < (diagonal ? row + 1 : columns); column++) {
            double found = sum_of_lanes(sums[row * COLUMNS + column]);
            for (int64_t left = whole; left < n; left++)
                found += (double)x[row * stride + left] * (double)y[column * stride + left];
            gram[row * k + column] += found;
        }
}

/* Inner products of k rows of at most RUN values, added to gram and mirrored there. */
static void add_products(const float *rows, int64_t stride, int64_t k, int64_t n, double *gram)
{
#define TILES(COUNT)                                                                                                    \
    {                                                                                                                   \
        int64_t j = 0;                                                                                                  \
        for (; j + COLUMNS <= i; j += COLUMNS)                                                                          \
            tile(x, rows + j * stride, stride, COUNT, COLUMNS, 0, n, k, gram + i * k + j);                              \
        if (ROWS < COLUMNS && j < i)                                                                                    \
            tile(x, rows + j * stride, stride, COUNT, ROWS, 0, n, k, gram + i * k + j);                                 \
        tile(x, x, stride, COUNT, COUNT, 1, n, k, gram + i * k + i);                                                    \
    }
    for (int64_t i = 0; i < k; i += ROWS) {
        const float *x = rows + i * stride;
        if (k - i >= ROWS)
            TILES(ROWS)
        else if (k - i == 1)
            TILES(1)
        else if (k - i == 2)
            TILES(2)
        else
            TILES(3)
    }
    for (int64_t i = 1; i < k; i++)
        for (int64_t j = 0; j < i; j++)
            gram[j * k + i] = gram[i * k + j];
}

/* Inner products of k rows of n values, `stride` apart, added to gram: of each RUN values to one `apart` after the last
 * (0: to the same). */
void crossfed_products(int64_t n, int64_t k, const float *rows, int64_t stride, double *gram, int64_t apart)
{
    for (int64_t start = 0; start < n; start += RUN, gram += apart)
        add_products(rows + start, stride, k, n - start < RUN ? n - start : RUN, gram);
}

/* Add `count` blocks of `size` values that lie beside each other to total, the first first. */
void crossfed_add_blocks(int64_t count, int64_t size, const double *blocks, double *total)
{
    for (int64_t block = 0; block < count; block++)
        for (int64_t i = 0; i < size; i++)
            total[i] += blocks[block * size + i];
}

/* base and k updates as stored -> base in float32, steps (update - base), their inner products, their weighted sum.
 * Not wanted: NULL for steps, gram or weights. `add`: the sum is added to the base in its place.
 * `gram_apart`: values from one gram to that of the next RUN values; 0: all are added to the same.
 * scratch: k times RUN values and SPARE, used where steps are not wanted. `scales`: of updates that are stored as differences,
 * whose first value begins a block; of SPARSE, which are at most a part, a `struct marked`. */
void crossfed_steps(int64_t n, int64_t k, const void *base, int base_kind, const void *const *updates,
                    const void *const *scales, const int *kinds, float *widened, float *steps, int64_t stride,
                    double *gram, int64_t gram_apart, const float *weights, float *sum, int add, float *scratch)
{
    for (int64_t row = 0; row < k; row++)
        if (kinds[row] == SPARSE)
            ((struct marked *)scales[row])->taken = 0;
    scratch = (float *)(((uintptr_t)scratch + 4 * SPARE - 1) / (4 * SPARE) * (4 * SPARE)); /* lines of the cache */
    for (int64_t start = 0; start < n; start += RUN) {
        int64_t count = n - start < RUN ? n - start : RUN, apart = steps ? stride : RUN;
        float *rows = steps ? steps + start : scratch;
        float *b = widened + start, *total = sum + start;
        widen(base, base_kind, start, count, b);
        if (weights || steps || gram)
            steps_of(b, updates, scales, kinds, k, start, count, n, weights, steps || gram, rows, apart, total);
        if (gram) {
            add_products(rows, apart, k, count, gram);
            gram += gram_apart;
        }
        for (int64_t i = 0; add && i < count; i++)
            b[i] += total[i];
    }
}

/* Fill `count` buffers of `sizes` bytes from `offsets` on of as many files. Returns how many are full, from the first on: the next
 * ended early or could not be read. */
int64_t crossfed_read(int64_t count, const int *descriptors, const int64_t *offsets, const int64_t *sizes,
                      char *const *buffers)
{
    for (int64_t i = 0; i < count; i++)
        for (int64_t done = 0; done < sizes[i];) {
            ssize_t found = pread(descriptors[i], buffers[i] + done, sizes[i] - done, offsets[i] + done);
            if (found > 0)
                done += found;
            else if (found == 0 || errno != EINTR)
                return i;
        }
    return count;
}

void crossfed_widen(int64_t n, const void *stored, int kind, float *out)
{
    widen(stored, kind, 0, n, out);
}

/* float32 to bfloat16 in the upper half, to nearest, ties to even. */
static inline __attribute__((always_inline)) uint32_t nearest(float value)
{
    uint32_t bits = to_bits(value);
    return bits + 0x7FFF + (bits >> 16 & 1);
}

/* float32 to bfloat16. Returns whether all of `out` is finite. NaN stays NaN, whatever its lower bits would be rounded to. */
int crossfed_narrow(int64_t n, const float *restrict values, uint16_t *restrict out)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = to_bits(values[i]) & 0x7FFFFFFF;
        out[i] = (uint16_t)(nearest(values[i]) >> 16);
        largest = magnitude > largest ? magnitude : largest;
    }
    for (int64_t i = 0; largest > 0x7F800000 && i < n; i++)
        if ((to_bits(values[i]) & 0x7FFFFFFF) > 0x7F800000)
            out[i] = (uint16_t)(to_bits(values[i]) >> 16 | 0x40);
    return largest < 0x7F7F8000; /* what is larger is rounded to infinity */
}

/* float32 to float16, to nearest, ties to even. Returns whether all of `out` is finite; what is not, NaN too, is written as
 * infinity. */
int crossfed_narrow_half(int64_t n, const float *restrict values, uint16_t *restrict out)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = to_bits(values[i]), magnitude = bits & 0x7FFFFFFF;
        /* From 2^-14 on the exponent's bias shrinks by 112; below, adding a half leaves what float16 holds in the last
         * bits of a float, rounded by the addition. */
        uint32_t normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3F000000;
        uint32_t rounded = magnitude < 0x38800000 ? subnormal : normal;
        rounded = rounded > 0x7C00 ? 0x7C00 : rounded;
        out[i] = (uint16_t)(rounded | (bits >> 16 & 0x8000));
        largest = rounded > largest ? rounded : largest;
    }
    return largest < 0x7C00;
}

/* The outer step of DiLoCo: new_velocity = momentum velocity + step, new_master = master + rate (step + momentum new_velocity). */
void crossfed_nesterov(int64_t n, float rate, float momentum, const float *restrict master, const float *restrict step,
                       const float *restrict velocity, float *restrict new_master, float *restrict new_velocity)
{
    for (int64_t i = 0; i < n; i++) {
        float v = momentum * velocity[i] + step[i];
        new_velocity[i] = v;
        new_master[i] = master[i] + rate * (step[i] + momentum * v);
    }
}

/* update - base in float32. Returns the sum of squares. */
double crossfed_difference(int64_t n, const void *update, int update_kind, const void *base, int base_kind,
                           float *out)
{
    float widened[RUN];
    double squared = 0;
    for (int64_t start = 0; start < n; start += RUN) {
        int64_t count = n - start < RUN ? n - start : RUN;
        float *restrict difference = out + start;
        widen(update, update_kind, start, count, difference);
        widen(base, base_kind, start, count, widened);
        for (int64_t i = 0; i < count; i++)
            difference[i] -= widened[i];
        add_products(difference, 0, 1, count, &squared);
    }
    return squared;
}

/* Values within `clip` as whole numbers of `unit`, to nearest; rest: what they leave of the step. */
static inline __attribute__((always_inline)) double fixed(double value, double clip, double per_unit)
{
    value = value < -clip ? -clip : value;
    value = value > clip ? clip : value;
    return rint(value * per_unit);
}

void crossfed_fixed16(int64_t n, double clip, double per_unit, double unit, const float *restrict step,
                      int16_t *restrict out, float *restrict rest)
{
    for (int64_t i = 0; i < n; i++) {
        double units = fixed(step[i], clip, per_unit);
        rest[i] = (float)((double)step[i] - units * unit);
        out[i] = (int16_t)(int32_t)units;
    }
}

void crossfed_fixed32(int64_t n, double clip, double per_unit, double unit, const float *restrict step,
                      int32_t *restrict out, float *restrict rest)
{
    for (int64_t i = 0; i < n; i++) {
        double units = fixed(step[i], clip, per_unit);
        rest[i] = (float)((double)step[i] - units * unit);
        out[i] = (int32_t)units;
    }
}

/* (update - base) times factor, as whole numbers within `clip`, plus or minus k streams: what is sent, and what the whole
 * numbers leave of the step: in bfloat16 beside 16 bits, in float32 beside 32. base NULL: the step is the update. Returns
 * the sum of squares of update - base. */
#define HALF(value) (uint16_t)(nearest(value) >> 16)
#define FULL(value) (value)
#define MASKED(NAME, WORD, SIGNED, REST, STORED)                                                                        \
    double NAME(int64_t n, const void *update, int update_kind, const void *base, int base_kind, float factor,          \
                double clip, double per_unit, double unit, int64_t k, const WORD *streams, int64_t stride,              \
                const int8_t *signs, WORD *restrict out, REST *restrict rest)                                           \
    {                                                                                                                   \
        float widened[RUN], steps[RUN];                                                                                 \
        double squared = 0;                                                                                             \
        for (int64_t start = 0; start < n; start += RUN) {                                                              \
            int64_t count = n - start < RUN ? n - start : RUN;                                                          \
            WORD *restrict sent = out + start;                                                                          \
            widen(update, update_kind, start, count, steps);                                                            \
            if (base) {                                                                                                 \
                widen(base, base_kind, start, count, widened);                                                          \
                for (int64_t i = 0; i < count; i++)                                                                     \
                    steps[i] -= widened[i];                                                                             \
            }                                                                                                           \
            add_products(steps, 0, 1, count, &squared);                                                                 \
            if (factor != 1)                                                                                            \
                for (int64_t i = 0; i < count; i++)                                                                     \
                    steps[i] *= factor;                                                                                 \
            for (int64_t i = 0; i < count; i++) {                                                                       \
                double units = fixed(steps[i], clip, per_unit);                                                         \
                rest[start + i] = STORED((float)((double)steps[i] - units * unit));                                     \
                sent[i] = (WORD)(SIGNED)(int32_t)units;                                                                 \
            }                                                                                                           \
            for (int64_t row = 0; row < k; row++) {                                                                     \
                const WORD *restrict stream = streams + row * stride + start;                                           \
                if (signs[row] > 0)                                                                                     \
                    for (int64_t i = 0; i < count; i++)                                                                 \
                        sent[i] = (WORD)(sent[i] + stream[i]);                                                          \
                else                                                                                                    \
                    for (int64_t i = 0; i < count; i++)                                                                 \
                        sent[i] = (WORD)(sent[i] - stream[i]);                                                          \
            }                                                                                                           \
        }                                                                                                               \
        return squared;                                                                                                 \
    }

MASKED(crossfed_masked16, uint16_t, int16_t, uint16_t, HALF)
MASKED(crossfed_masked32, uint32_t, int32_t, float, FULL)

/* Blocks of `block` values: the largest and the smallest of each, and of zero. */
static inline void ends(const float *restrict values, int64_t n, float *high, float *low)
{
    float highest[LANES] = {0}, lowest[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = values[i + lane];
            highest[lane] = value > highest[lane] ? value : highest[lane];
            lowest[lane] = value < lowest[lane] ? value : lowest[lane];
        }
    for (; i < n; i++) {
        highest[0] = values[i] > highest[0] ? values[i] : highest[0];
        lowest[0] = values[i] < lowest[0] ? values[i] : lowest[0];
    }
    for (int lane = 1; lane < LANES; lane++) {
        highest[0] = highest[lane] > highest[0] ? highest[lane] : highest[0];
        lowest[0] = lowest[lane] < lowest[0] ? lowest[lane] : lowest[0];
    }
    *high = highest[0], *low = lowest[0];
}

void crossfed_int8_encode(int64_t n, int64_t block, float per_level, float smallest, const float *restrict values,
                          int8_t *restrict q, float *restrict scales)
{
    for (int64_t start = 0; start < n; start += block) {
        int64_t count = n - start < block ? n - start : block;
        float high, low;
        ends(values + start, count, &high, &low);
        float scale = (high > -low ? high : -low) * per_level;
        scale = scale < smallest ? 0 : scale;
        *scales++ = scale;
        float inverse = scale > 0 ? 1 / scale : 0;
        for (int64_t i = 0; i < count; i++)
            q[start + i] = (int8_t)(int32_t)rintf(values[start + i] * inverse);
    }
}

void crossfed_int8_decode(int64_t n, int64_t block, const int8_t *q, const float *scales, float *out)
{
    int8_values(n, block, q, scales, out);
}

/* q: one byte for two values; scales: bfloat16, of either sign. */
void crossfed_int4_encode(int64_t n, int64_t block, float levels, float smallest, const float *restrict values,
                          uint8_t *restrict q, uint16_t *restrict scales)
{
    float per_level = 1 / levels;
    uint8_t nibbles[RUN + 1]; /* block is at most RUN */
    for (int64_t start = 0; start < n; start += block) {
        int64_t count = n - start < block ? n - start : block;
        float high, low;
        ends(values + start, count, &high, &low);
        float scale = (high > -low ? -high : -low) * per_level;
        scale = fabsf(scale) < smallest ? 0 : scale;
        uint16_t stored = (uint16_t)((to_bits(scale) + 0xFFFF) >> 16); /* away from zero */
        scale = from_bits((uint32_t)stored << 16);
        *scales++ = stored;
        float inverse = scale != 0 ? 1 / scale : 0;
        for (int64_t i = 0; i < count; i++) {
            float level = rintf(values[start + i] * inverse);
            level = level < levels - 1 ? level : levels - 1;
            nibbles[i] = (uint8_t)(int32_t)(level + levels);
        }
        if (count & 1)
            nibbles[count] = (uint8_t)(int32_t)levels;
        for (int64_t i = 0; i < count; i += 2)
            *q++ = (uint8_t)(nibbles[i] | nibbles[i + 1] << 4);
    }
}

void crossfed_int4_decode(int64_t n, int64_t block, float levels, const uint8_t *q, const uint16_t *scales, float *out)
{
    int4_values(n, block, levels, q, scales, out);
}

/* Copies those of eight values whose bit is set; returns where the next goes. No branch to predict. */
static inline float *take_eight(const float *restrict values, unsigned mask, float *restrict to)
{
    for (int i = 0; i < 8; i++) {
        *to = values[i]; /* written over unless its bit is set */
        to += mask >> i & 1;
    }
    return to;
}

/* The magnitudes that reach `limit` (above 0): a bit each in `kept`, and in `codes` a sign and one of eight levels, about
   even on a logarithmic scale up to the largest, two a byte. `levels`: the mean of each level's magnitudes. Returns how
   many reach it. n is at most PART. */
int64_t crossfed_sparse_encode(int64_t n, float limit, const float *restrict values, uint8_t *restrict kept,
                               uint8_t *restrict codes, float *restrict levels)
{
    float reached[PART + 1];
    uint8_t places[PART + 8];
    const uint32_t low = to_bits(limit);
    uint32_t top = low;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = to_bits(values[i]) & 0x7FFFFFFF;
        top = magnitude > top ? magnitude : top;
    }
    for (int64_t i = 0; i < n; i++)
        places[i] = (to_bits(values[i]) & 0x7FFFFFFF) >= low;
    memset(places + n, 0, 8);
    float *next = reached;
    for (int64_t start = 0; start < n; start += 8) {
        uint64_t bytes;
        memcpy(&bytes, places + start, 8);
        unsigned mask = (unsigned)(bytes * 0x0102040810204080 >> 56); /* the eight lowest bits, side by side */
        if (n - start >= 8)
            next = take_eight(values + start, mask, next);
        else
            for (int64_t i = start; i < n; i++)
                if (mask >> (i - start) & 1)
                    *next++ = values[i];
        *kept++ = (uint8_t)mask;
    }
    const int64_t count = next - reached;
    const float per_level = 8.0f / (float)(top - low + 1);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = to_bits(reached[i]);
        int place = (int)((float)((bits & 0x7FFFFFFF) - low) * per_level);
        places[i] = (uint8_t)((place < 7 ? place : 7) | (bits >> 31) << 3);
    }
    double sums[4][16] = {{0}}; /* four of each: one addition need not wait for the last to the same level */
    int32_t counts[4][16] = {{0}};
    for (int64_t i = 0; i < count; i++) {
        sums[i & 3][places[i]] += reached[i];
        counts[i & 3][places[i]]++;
    }
    for (int level = 0; level < 8; level++) {
        double sum = 0;
        int32_t number = 0;
        for (int lane = 0; lane < 4; lane++) {
            sum += sums[lane][level] - sums[lane][level + 8];
            number += counts[lane][level] + counts[lane][level + 8];
        }
        levels[level] = number ? (float)(sum / number) : 0;
    }
    for (int64_t i = 0; i + 1 < count; i += 2)
        *codes++ = (uint8_t)(places[i] | places[i + 1] << 4);
    if (count & 1)
        *codes = places[count - 1];
    return count;
}

/* One part: `codes` holds half a byte for each bit of `kept`. */
void crossfed_sparse_decode(int64_t n, const uint8_t *kept, const uint8_t *codes, const float *levels, float *out)
{
    struct marked part = {levels, codes, 0};
    for (int64_t start = 0; start < n; start += RUN)
        marked_values(n - start < RUN ? n - start : RUN, kept + start / 8, &part, out + start);
}

/* n values in chunks. Returns what `odd_places` says of the first chunk that is odd, or 0. */
int64_t crossfed_placed_check(int64_t n, const uint8_t *code)
{
    int64_t begins[5];
    streams_of(CHUNK, begins);
    for (int64_t start = 0; start < n; start += CHUNK, code += begins[4]) {
        int odd = odd_places(code, n - start < CHUNK ? n - start : CHUNK);
        if (odd)
            return odd;
    }
    return 0;
}

void crossfed_placed_decode(int64_t n, const uint8_t *code, const uint16_t *levels, float *out)
{
    for (int64_t start = 0; start < n; start += CHUNK)
        chunk_values(code, levels, start, n - start < CHUNK ? n - start : CHUNK, n, out + start);
}

/* How many bits are set for each part of n values of every message, whose first begins a part. Returns the first message with bits
 * past the last value, or -1. */
int64_t crossfed_sparse_counts(int64_t messages, int64_t n, const uint8_t *const *kept, int64_t *counts)
{
    int64_t odd = -1;
    for (int64_t message = 0; message < messages; message++) {
        for (int64_t start = 0; start < n; start += PART)
            *counts++ = bits_in(n - start < PART ? n - start : PART, kept[message] + start / 8);
        if (odd < 0 && n % 8 && kept[message][n / 8] >> n % 8)
            odd = message;
    }
    return odd;
}
