// ELU in CUDA C++: one thread per element.
#include <cmath>

__global__ void elu_kernel(const float* x, float* out, long long size, float alpha) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) out[i] = x[i] < 0 ? alpha * expm1f(x[i]) : x[i];
}

#ifdef __CUDACC__
void launch_elu(const float* x, float* out, long long size, float alpha, cudaStream_t stream) {
  int threads = 256;
  elu_kernel<<<(unsigned)((size + threads - 1) / threads), threads, 0, stream>>>(x, out, size, alpha);
}
#endif
