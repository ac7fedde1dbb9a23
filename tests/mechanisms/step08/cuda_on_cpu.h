// Enough of CUDA C++ to run matmul.cu on a CPU: a thread per thread, one block after another. Every read of an input
// matrix is noted, in the order of blocks and threads.
#include <barrier>
#include <thread>
#include <vector>

#define __global__
#define __shared__ static  // blocks run one after another, so the threads of one block share it
#define __syncthreads() together->arrive_and_wait()

struct Dim3 {
  int x, y;
};

static thread_local Dim3 threadIdx, blockIdx;
static thread_local std::vector<long long>* reads;
static std::barrier<>* together;

struct Matrix {
  const float* data;
  float operator[](int index) const {
    reads->push_back((long long)(data + index));
    return data[index];
  }
};

using Kernel = void (*)(Matrix, Matrix, float*, int, int, int);

// Runs the kernel; each thread that read appends its number of reads and their addresses. Returns the total length.
static long long run(Kernel kernel, Dim3 grid, Dim3 block, const float* a, const float* b, float* c, int M, int N,
                     int K, long long* addresses) {
  long long length = 0;
  for (int by = 0; by < grid.y; by++)
    for (int bx = 0; bx < grid.x; bx++) {
      std::barrier<> barrier(block.x * block.y);
      together = &barrier;
      std::vector<std::vector<long long>> notes(block.x * block.y);
      std::vector<std::thread> threads;
      for (int ty = 0; ty < block.y; ty++)
        for (int tx = 0; tx < block.x; tx++)
          threads.emplace_back([=, &notes] {
            threadIdx = {tx, ty};
            blockIdx = {bx, by};
            reads = &notes[ty * block.x + tx];
            kernel({a}, {b}, c, M, N, K);
          });
      for (auto& thread : threads) thread.join();
      for (auto& each : notes)
        for (long long address : each) addresses[length++] = address;
    }
  return length;
}
