// The part of the BLAS shim that computes; shim.py defines the names in capitals and adds the jumps.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

typedef const float *in;
typedef void gemm(int, int, int, int, int, int, float, in, int, in, int, float, float *, int);
typedef void gemv(int, int, int, int, float, in, int, in, int, float, float *, int);
extern void *TABLE[];

enum { ROW_MAJOR = 101, AS_STORED = 111, TRANSPOSED = 112 };

static bool few_rows(int tb, int m, int n, int k, in x, int ldx, in w, int ldw, bool adds,
                     float *y, int ldy);

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, in a, int lda,
                 in b, int ldb, float beta, float *c, int ldc) {
    if (order == ROW_MAJOR && ta == AS_STORED && alpha == 1.0f && (beta == 0.0f || beta == 1.0f) &&
        few_rows(tb, m, n, k, a, lda, b, ldb, beta == 1.0f, c, ldc))
        return;
    if (order != ROW_MAJOR || m != 1 || n < 1 || k < 1 || (ta != AS_STORED && ta != TRANSPOSED) ||
        (tb != AS_STORED && tb != TRANSPOSED)) {
        ((gemm *)TABLE[GEMM])(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    // C[1,n] = A[1,k] op(B)[k,n] is y = op(B)^T x.
    if (beta == 0.0f)  // memory that nobody wrote may hold NaN
        for (int i = 0; i < n; i++) c[i] = 0.0f;
    int step = ta == AS_STORED ? 1 : lda;
    if (tb == AS_STORED)
        ((gemv *)TABLE[GEMV])(ROW_MAJOR, TRANSPOSED, k, n, alpha, b, ldb, a, step, beta, c, 1);
    else
        ((gemv *)TABLE[GEMV])(ROW_MAJOR, AS_STORED, n, k, alpha, b, ldb, a, step, beta, c, 1);
}

#ifdef __x86_64__
#include <immintrin.h>

// y[m,n] = x[m,k] w[n,k]^T, or that and what y is, added last; or y = x[m,k] w[k,n]
typedef struct product {
    in x, w;
    float *y;
    long m, n, k, ldx, ldw, ldy;
    bool adds;
    void (*multiply)(const struct product *, long from, long to);
} product;

// Kernels of this machine, by w[n,k] and by w[k,n]; NULL where there are none.
static void (*across)(const product *, long, long), (*along)(const product *, long, long);

enum {
    COLUMNS = 4,
    WIDEST = 16,              // floats in a register
    MANY_ROWS = 12,           // from here on w is used so often that a copy of it pays
    MOST_ROWS = 128,          // with more, packing all of w, as OpenBLAS does, is no loss
    MOST_COPIED = 4096,       // floats of a column
    HEAD = 32,                // columns of w[k,n] that are summed together; all are shared by these
    WIDEST_HEAD = 256,        // with more, pieces of rows lie too far from each other
    MOST_QUERIES = 8,         // with more, OpenBLAS is faster for w[k,n]
    IN_A_ROW = 256,           // products that are added one by one: longer sums round more
    WORTH_SHARING = 1 << 17,  // values of w
};

static in copy_rows(float *to, in from, long ld, long rows, long k) {
    for (long i = 0; i < rows; i++) memcpy(to + i * k, from + i * ld, k * sizeof(float));
    return to;
}

// Clang unrolls loops over registers unasked; where asked, too late to keep sums in registers.
#ifdef __clang__
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 4")
#endif

// Columns [from, to) of y. Each value is the sum over k in one order, whatever the other rows and
// columns are: lane by lane in one register, then across its lanes. Many rows pass by an aligned
// copy of some columns of w, because loads across cache lines take twice as long and MLX aligns to
// 16 bytes; meanwhile the next columns are fetched from memory.
#define KERNEL(NAME, TARGET, VECTOR, MM, LANES, ROWS, HALF)                                        \
    __attribute__((target(TARGET), always_inline)) static inline void NAME##_tile(                 \
        int rows, in x, long ldx, in w, long ldw, long k, bool adds, float *y, long ldy) {         \
        VECTOR sums[ROWS][COLUMNS];                                                                \
        UNROLL for (int i = 0; i < rows; i++)                                                      \
            UNROLL for (int j = 0; j < COLUMNS; j++)                                               \
                sums[i][j] = MM##_setzero_ps();                                                    \
        for (long p = 0; p < k; p += LANES) {                                                      \
            VECTOR a[ROWS];                                                                        \
            UNROLL for (int i = 0; i < rows; i++)                                                  \
                a[i] = MM##_loadu_ps(x + i * ldx + p);                                             \
            UNROLL for (int j = 0; j < COLUMNS; j++) {                                             \
                VECTOR b = MM##_loadu_ps(w + j * ldw + p);                                         \
                UNROLL for (int i = 0; i < rows; i++)                                              \
                    sums[i][j] = MM##_fmadd_ps(a[i], b, sums[i][j]);                               \
            }                                                                                      \
        }                                                                                          \
        UNROLL for (int i = 0; i < rows; i++) {                                                    \
            __m256 left = _mm256_hadd_ps(HALF(sums[i][0]), HALF(sums[i][1]));                      \
            __m256 right = _mm256_hadd_ps(HALF(sums[i][2]), HALF(sums[i][3]));                     \
            __m256 four = _mm256_hadd_ps(left, right);                                             \
            __m128 upper = _mm256_extractf128_ps(four, 1);                                         \
            __m128 sum = _mm_add_ps(_mm256_castps256_ps128(four), upper);                          \
            if (adds) sum = _mm_add_ps(_mm_loadu_ps(y + i * ldy), sum);                            \
            _mm_storeu_ps(y + i * ldy, sum);                                                       \
        }                                                                                          \
    }                                                                                              \
    __attribute__((target(TARGET))) static void NAME(const product *p, long from, long to) {       \
        const bool many = p->m >= MANY_ROWS;                                                       \
        const long lines = COLUMNS * p->k / 16, tiles = (p->m + ROWS - 1) / ROWS;                  \
        const long share = many ? (lines + tiles - 1) / tiles : 0;                                 \
        const bool copies = many && p->k <= MOST_COPIED;                                           \
        _Alignas(64) float copy[COLUMNS * MOST_COPIED];                                            \
        for (long j = from; j < to; j += COLUMNS) {                                                \
            in w = p->w + j * p->ldw, next = w + COLUMNS * p->ldw;                                 \
            long i = 0, ldw = copies ? p->k : p->ldw;                                              \
            if (copies) w = copy_rows(copy, w, p->ldw, COLUMNS, p->k);                             \
            for (; i + ROWS <= p->m; i += ROWS) {                                                  \
                for (long line = 0; line < share; line++, next += 16)                              \
                    _mm_prefetch((const char *)next, _MM_HINT_T1);                                 \
                NAME##_tile(ROWS, p->x + i * p->ldx, p->ldx, w, ldw, p->k, p->adds,                \
                            p->y + i * p->ldy + j, p->ldy);                                        \
            }                                                                                      \
            for (; i < p->m; i++)                                                                  \
                NAME##_tile(1, p->x + i * p->ldx, p->ldx, w, ldw, p->k, p->adds,                   \
                            p->y + i * p->ldy + j, p->ldy);                                        \
        }                                                                                          \
    }

// Columns [from, to) of y by w[k,n]: weights of the slots of a cache times its values. Again each
// value is a sum in one order, whatever the other rows and columns are.
#define ALONG(NAME, TARGET, VECTOR, MM, LANES, ROWS)                                               \
    __attribute__((target(TARGET), always_inline)) static inline void NAME##_piece(                \
        int rows, const product *p, long i, long j, long q) {                                      \
        const long ldx = p->ldx, ldw = p->ldw, k = p->k - q < IN_A_ROW ? p->k - q : IN_A_ROW;      \
        in x = p->x + i * ldx + q, w = p->w + q * ldw + j;                                         \
        VECTOR sums[ROWS][HEAD / LANES];                                                           \
        UNROLL for (int r = 0; r < rows; r++)                                                      \
            UNROLL for (int v = 0; v < HEAD / LANES; v++)                                          \
                sums[r][v] = MM##_setzero_ps();                                                    \
        for (long s = 0; s < k; s++) {                                                             \
            VECTOR b[HEAD / LANES];                                                                \
            UNROLL for (int v = 0; v < HEAD / LANES; v++)                                          \
                b[v] = MM##_loadu_ps(w + s * ldw + v * LANES);                                     \
            UNROLL for (int r = 0; r < rows; r++) {                                                \
                VECTOR a = MM##_set1_ps(x[r * ldx + s]);                                           \
                UNROLL for (int v = 0; v < HEAD / LANES; v++)                                      \
                    sums[r][v] = MM##_fmadd_ps(a, b[v], sums[r][v]);                               \
            }                                                                                      \
        }                                                                                          \
        UNROLL for (int r = 0; r < rows; r++)                                                      \
            UNROLL for (int v = 0; v < HEAD / LANES; v++) {                                        \
                float *y = p->y + (i + r) * p->ldy + j + v * LANES;                                \
                MM##_storeu_ps(y, q ? MM##_add_ps(MM##_loadu_ps(y), sums[r][v]) : sums[r][v]);     \
            }                                                                                      \
    }                                                                                              \
    __attribute__((target(TARGET))) static void NAME(const product *p, long from, long to) {       \
        for (long j = from; j < to; j += HEAD)                                                     \
            for (long q = 0; q < p->k; q += IN_A_ROW) {                                            \
                long i = 0;                                                                        \
                for (; i + ROWS <= p->m; i += ROWS) NAME##_piece(ROWS, p, i, j, q);                \
                if (p->m - i == 3) NAME##_piece(3, p, i, j, q);                                    \
                if (p->m - i == 2) NAME##_piece(2, p, i, j, q);                                    \
                if (p->m - i == 1) NAME##_piece(1, p, i, j, q);                                    \
            }                                                                                      \
    }

#define AS_IT_IS(v) (v)
#define FOLDED(v)                                                                                  \
    _mm256_add_ps(_mm512_castps512_ps256(v),                                                       \
                  _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)))
KERNEL(avx2, "avx2,fma", __m256, _mm256, 8, 3, AS_IT_IS)
KERNEL(avx512, "avx512f", __m512, _mm512, 16, 4, FOLDED)
ALONG(avx2_along, "avx2,fma", __m256, _mm256, 8, 3)
ALONG(avx512_along, "avx512f", __m512, _mm512, 16, 4)

// Helpers share a product with the caller, who never waits for one that has not begun: where other
// processes keep the cores busy, the caller does all of it. Between the products of a step they
// stay awake, since waking one takes as long as a small product.
enum { MOST_HELPERS = 63, YIELDS = 400, CHUNKS = 8 };

static struct {
    pthread_mutex_t calling, lock;
    pthread_cond_t wake;
    product task;
    long chunk;
    atomic_long next;  // first column that nobody has taken
    atomic_uint round; // counts the products
    atomic_int busy;   // helpers that may still look at the task
    int helpers, wanted, sleeping;
} pool = {.calling = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

// Of x, for who holds `calling`. Memory is taken up where something is written first.
_Alignas(64) static float copy_of_x[MOST_ROWS * 16384];

static void share_task(void) {
    long from, n = pool.task.n;
    while ((from = atomic_fetch_add(&pool.next, pool.chunk)) < n)
        pool.task.multiply(&pool.task, from, from + pool.chunk < n ? from + pool.chunk : n);
}

static void *help(void *number) {
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < YIELDS && atomic_load(&pool.round) == seen; i++) sched_yield();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) {
            pool.sleeping++;
            pthread_cond_wait(&pool.wake, &pool.lock);
            pool.sleeping--;
        }
        seen = atomic_load(&pool.round);
        bool wanted = (long)number < pool.wanted;
        if (wanted) atomic_fetch_add(&pool.busy, 1);
        pthread_mutex_unlock(&pool.lock);
        if (!wanted) continue;
        share_task();
        atomic_fetch_sub(&pool.busy, 1);
    }
    return NULL;
}

static void wait_for_helpers(void) {
    while (atomic_load(&pool.busy)) sched_yield();
}

static void compute_together(const product *task, int helpers) {
    if (helpers > MOST_HELPERS) helpers = MOST_HELPERS;
    pthread_mutex_lock(&pool.lock);
    wait_for_helpers(); // late ones, that find nothing left of the last product
    for (pthread_t thread; pool.helpers < helpers; pool.helpers++) {
        if (pthread_create(&thread, NULL, help, (void *)(long)pool.helpers)) break;
        pthread_detach(thread);
    }
    pool.wanted = helpers;
    pool.task = *task;
    long chunk = task->n / (CHUNKS * (helpers + 1));
    pool.chunk = chunk < HEAD ? HEAD : chunk - chunk % HEAD;
    atomic_store(&pool.next, 0);
    atomic_fetch_add(&pool.round, 1);
    if (pool.sleeping) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    share_task();
    wait_for_helpers();
}

static bool few_rows(int tb, int m, int n, int k, in x, int ldx, in w, int ldw, bool adds,
                     float *y, int ldy) {
    product task = {x, w, y, m, n, k, ldx, ldw, ldy, adds, tb == TRANSPOSED ? across : along};
    const bool one = tb == TRANSPOSED && m >= 1 && m <= MOST_ROWS && n % COLUMNS == 0 &&
                     k % WIDEST == 0;
    const bool other = tb == AS_STORED && m >= 2 && m <= MOST_QUERIES && n % HEAD == 0 &&
                       n <= WIDEST_HEAD && !adds;
    if (!task.multiply || n < 1 || k < 1 || !(one || other)) return false;
    if ((long)n * k < WORTH_SHARING || pthread_mutex_trylock(&pool.calling)) {
        task.multiply(&task, 0, n);
        return true;
    }
    if (m >= MANY_ROWS && (long)m * k <= (long)(sizeof copy_of_x / sizeof *copy_of_x)) {
        task.x = copy_rows(copy_of_x, x, ldx, m, k);
        task.ldx = k;
    }
    int threads = TABLE[THREADS] ? ((int (*)(void))TABLE[THREADS])() : 1;
    if (threads > 1)
        compute_together(&task, threads - 1);
    else
        task.multiply(&task, 0, n);
    pthread_mutex_unlock(&pool.calling);
    return true;
}

// No helper lives on in the child of a fork, and locks may be as one of them left them.
static void start_afresh(void) {
    pthread_mutex_init(&pool.calling, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.busy, 0);
    pool.helpers = pool.sleeping = 0;
}

__attribute__((constructor)) static void choose_kernel(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        across = avx512, along = avx512_along;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        across = avx2, along = avx2_along;
    pthread_atfork(NULL, NULL, start_afresh);
}
#else
static bool few_rows(int tb, int m, int n, int k, in x, int ldx, in w, int ldw, bool adds,
                     float *y, int ldy) {
    (void)tb, (void)m, (void)n, (void)k, (void)x, (void)ldx, (void)w, (void)ldw, (void)adds;
    (void)y, (void)ldy;
    return false;
}
#endif
