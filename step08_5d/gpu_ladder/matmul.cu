// C = A B three times, for row-major float32 matrices: A is M x K, B is K x N.
//
// A warp is 32 threads with consecutive threadIdx.x. What matters is which elements *they* read together.
constexpr int TILE = 32;  // threads along x and y: one warp is one row of a block

#ifdef __CUDACC__
using Matrix = const float*;
#endif

// threadIdx.x counts rows: in each step of the loop, a warp reads 32 elements of a *column* of A.
__global__ void naive(Matrix a, Matrix b, float* c, int M, int N, int K) {
  int row = blockIdx.x * TILE + threadIdx.x;
  int column = blockIdx.y * TILE + threadIdx.y;
  if (row >= M || column >= N) return;
  float total = 0;
  for (int k = 0; k < K; k++) total += a[row * K + k] * b[k * N + column];
  c[row * N + column] = total;
}

// threadIdx.x counts columns: a warp reads one element of A and 32 neighbors of a *row* of B.
__global__ void coalesced(Matrix a, Matrix b, float* c, int M, int N, int K) {
  int row = blockIdx.y * TILE + threadIdx.y;
  int column = blockIdx.x * TILE + threadIdx.x;
  if (row >= M || column >= N) return;
  float total = 0;
  for (int k = 0; k < K; k++) total += a[row * K + k] * b[k * N + column];
  c[row * N + column] = total;
}

// The block loads a tile of A and one of B into shared memory, and all its threads read them from there.
__global__ void tiled(Matrix a, Matrix b, float* c, int M, int N, int K) {
  __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
  int x = threadIdx.x, y = threadIdx.y;
  int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
  float total = 0;
  for (int start = 0; start < K; start += TILE) {
    a_tile[y][x] = row < M && start + x < K ? a[row * K + start + x] : 0;
    b_tile[y][x] = start + y < K && column < N ? b[(start + y) * N + column] : 0;
    __syncthreads();  // the tiles are complete
    for (int k = 0; k < TILE; k++) total += a_tile[y][k] * b_tile[k][x];
    __syncthreads();  // nobody needs them anymore
  }
  if (row < M && column < N) c[row * N + column] = total;
}

#ifdef __CUDACC__
void launch_matmul(int kernel, Matrix a, Matrix b, float* c, int M, int N, int K, cudaStream_t stream) {
  dim3 threads(TILE, TILE), rows_first((M + TILE - 1) / TILE, (N + TILE - 1) / TILE);
  dim3 columns_first(rows_first.y, rows_first.x);
  if (kernel == 0) naive<<<rows_first, threads, 0, stream>>>(a, b, c, M, N, K);
  if (kernel == 1) coalesced<<<columns_first, threads, 0, stream>>>(a, b, c, M, N, K);
  if (kernel == 2) tiled<<<columns_first, threads, 0, stream>>>(a, b, c, M, N, K);
}
#endif
