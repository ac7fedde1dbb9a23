// The smallest whole CUDA program: c = a + b. A kernel for the GPU, and the host code around it.
//
//     nvcc vec_add.cu -o vec_add && ./vec_add 1000000
#include <cstdio>
#include <cstdlib>
#include <vector>

// Runs on the GPU, once per thread: each adds one pair of numbers.
__global__ void add_kernel(const float* a, const float* b, float* c, size_t n) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];  // the last block has threads beyond the end
}

// Every call of the runtime can fail, and a kernel fails silently until somebody asks.
static void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "vec_add: %s\n", cudaGetErrorString(status));
  exit(1);
}

// Runs on the CPU ("host"). a, b and c are in its memory; gpu_a, gpu_b and gpu_c in the GPU's.
void add(const float* a, const float* b, float* c, size_t n) {
  size_t bytes = n * sizeof(float);  // not int, which ends at 2 GiB
  float *gpu_a, *gpu_b, *gpu_c;
  check(cudaMalloc(&gpu_a, bytes));
  check(cudaMalloc(&gpu_b, bytes));
  check(cudaMalloc(&gpu_c, bytes));
  check(cudaMemcpy(gpu_a, a, bytes, cudaMemcpyHostToDevice));
  check(cudaMemcpy(gpu_b, b, bytes, cudaMemcpyHostToDevice));

  int threads = 256, blocks = (int)((n + threads - 1) / threads);  // of a block; rounded up
  add_kernel<<<blocks, threads>>>(gpu_a, gpu_b, gpu_c, n);         // returns at once
  check(cudaGetLastError());                                       // could it be launched?
  check(cudaMemcpy(c, gpu_c, bytes, cudaMemcpyDeviceToHost));      // waits for the kernel

  check(cudaFree(gpu_a));
  check(cudaFree(gpu_b));
  check(cudaFree(gpu_c));
}

int main(int count, char** arguments) {
  size_t n = count > 1 ? strtoull(arguments[1], nullptr, 10) : 1000000, wrong = 0;
  std::vector<float> a(n), b(n), c(n);
  for (size_t i = 0; i < n; i++) a[i] = i % 1000, b[i] = 1000 - a[i];
  add(a.data(), b.data(), c.data(), n);
  for (float sum : c) wrong += sum != 1000;
  printf("%zu sums, %zu of them wrong\n", n, wrong);
  return wrong > 0;
}
