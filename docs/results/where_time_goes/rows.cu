// SPDX-License-Identifier: Apache-2.0
// How fast rows of 14 KB can be written to, and added up from, places that a routing
// of 256 experts gives, if a kernel does nothing else. One GPU:
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a rows.cu -o rows
//   ./rows 8192 4        tokens of all ranks, rows of each
//
// Formatted, and a copy left out, after rows.txt was made.
//
// scat: tokens to rows, by warps; <parts of a token, kind of store, warps of a block>
// scatb: by blocks; "TMA": by bulk copies through shared memory
// gath: rows to sums, by warps; <parts, steps at once, rows at once, warps of a block>
// gathb: by blocks; "TMA gather": by bulk copies. TB/s: rows and tokens together.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>
#define CK(x)                                                      \
  do {                                                             \
    cudaError_t e = (x);                                           \
    if (e) {                                                       \
      printf("err %s line %d\n", cudaGetErrorString(e), __LINE__); \
      exit(1);                                                     \
    }                                                              \
  } while (0)
constexpr int ROWB = 14336, NV = ROWB / 16, STEPS = 28;
__device__ inline uint4 ld(const uint8_t* p) { return *(const uint4*)p; }
template <int CO>
__device__ inline void st(uint8_t* p, uint4 v, uint64_t pol) {
  if constexpr (CO == 0)
    *(uint4*)p = v;
  else if constexpr (CO == 1)
    asm volatile("st.global.cs.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  else
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0],{%1,%2,%3,%4},%5;" ::"l"(p),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(pol)
                 : "memory");
}
__device__ inline uint64_t policy() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
// scatter by warps: PARTS parts of a token
template <int PARTS, int CO, int W>
__global__ void __launch_bounds__(512)
    scat(const uint8_t* tok, const int* rows, uint8_t* dst, int T, int K) {
  int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  if (w >= W) return;
  uint64_t pol = CO == 2 ? policy() : 0;
  int n = T * PARTS;
  for (int it = blockIdx.x + w * gridDim.x; it < n; it += W * gridDim.x) {
    int t = it / PARTS, p = it % PARTS;
    int r = 0;
    if (lane < K) r = rows[t * K + lane];
    constexpr int SP = STEPS / PARTS;
    for (int s0 = 0; s0 < SP; s0 += 7) {
      uint4 v[7];
#pragma unroll
      for (int i = 0; i < 7; i++)
        if (s0 + i < SP)
          v[i] = ld(tok + (size_t)t * ROWB + ((p * SP + s0 + i) * 32 + lane) * 16);
      for (int k = 0; k < K; k++) {
        int rr = __shfl_sync(~0u, r, k);
        uint8_t* q = dst + (size_t)rr * ROWB;
#pragma unroll
        for (int i = 0; i < 7; i++)
          if (s0 + i < SP) st<CO>(q + ((p * SP + s0 + i) * 32 + lane) * 16, v[i], pol);
      }
    }
  }
}
// scatter by blocks: 14 warps, 2 steps each
template <int CO>
__global__ void __launch_bounds__(448)
    scatb(const uint8_t* tok, const int* rows, uint8_t* dst, int T, int K) {
  int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  uint64_t pol = CO == 2 ? policy() : 0;
  for (int t = blockIdx.x; t < T; t += gridDim.x) {
    int r = 0;
    if (lane < K) r = rows[t * K + lane];
    uint4 v[2];
    for (int i = 0; i < 2; i++)
      v[i] = ld(tok + (size_t)t * ROWB + ((w * 2 + i) * 32 + lane) * 16);
    for (int k = 0; k < K; k++) {
      int rr = __shfl_sync(~0u, r, k);
      uint8_t* q = dst + (size_t)rr * ROWB;
      for (int i = 0; i < 2; i++) st<CO>(q + ((w * 2 + i) * 32 + lane) * 16, v[i], pol);
    }
  }
}
__device__ inline uint32_t sa(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ inline void mbi(uint64_t* b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(sa(b)), "r"(n)
               : "memory");
}
__device__ inline void mbx(uint64_t* b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(sa(b)),
               "r"(n)
               : "memory");
}
__device__ inline void mba(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(sa(b)) : "memory");
}
__device__ inline void mbw(uint64_t* b, int par) {
  uint32_t ok;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 "
        "%0,1,0,p;}"
        : "=r"(ok)
        : "r"(sa(b)), "r"(par)
        : "memory");
  } while (!ok);
}
__device__ inline void g2s(void* d, const void* s, int n, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0],[%1],%2,[%3];" ::"r"(sa(d)),
      "l"(s), "r"(n), "r"(sa(b))
      : "memory");
}
__device__ inline void s2g(void* d, const void* s, int n) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(d),
               "r"(sa(s)), "r"(n)
               : "memory");
}
__device__ inline void s2gp(void* d, const void* s, int n, uint64_t pol) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0],[%1],%2,%3;" ::
          "l"(d),
      "r"(sa(s)), "r"(n), "l"(pol)
      : "memory");
}
// scatter by TMA: W warps, each a ring of S stages of ROWB/PARTS bytes
template <int W, int S, int PARTS, int CO>
__global__ void __launch_bounds__(512)
    scatt(const uint8_t* tok, const int* rows, uint8_t* dst, int T, int K) {
  extern __shared__ __align__(128) uint8_t sm[];
  __shared__ uint64_t bar[W * S];
  constexpr int CB = ROWB / PARTS;
  int w = threadIdx.x >> 5;
  if (w >= W || (threadIdx.x & 31)) return;
  uint64_t* b = bar + w * S;
  uint8_t* ring = sm + (size_t)w * S * CB;
  for (int i = 0; i < S; i++) mbi(b + i, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  uint64_t pol = CO ? policy() : 0;
  int n = T * PARTS, first = blockIdx.x + w * gridDim.x, str = W * gridDim.x;
  int cnt = first < n ? (n - 1 - first) / str + 1 : 0;
  auto load = [&](int j) {
    int it = first + j * str, t = it / PARTS, p = it % PARTS;
    mbx(b + j % S, CB);
    g2s(ring + (j % S) * CB, tok + (size_t)t * ROWB + p * CB, CB, b + j % S);
  };
  constexpr int L =
      S > 1 ? S - 1 : 1;  // loads ahead: one stage left for stores to be read
  for (int j = 0; j < L && j < cnt; j++) load(j);
  for (int j = 0; j < cnt; j++) {
    mbw(b + j % S, (j / S) & 1);
    int it = first + j * str, t = it / PARTS, p = it % PARTS;
    for (int k = 0; k < K; k++) {
      int rr = rows[t * K + k];
      uint8_t* q = dst + (size_t)rr * ROWB + p * CB;
      if (CO)
        s2gp(q, ring + (j % S) * CB, CB, pol);
      else
        s2g(q, ring + (j % S) * CB, CB);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (j + L < cnt) {
      if (S > 1)
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      else
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      load(j + L);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ inline void addv(float* s, uint4 v, float w) {
  uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s[2 * i] = fmaf(w, __uint_as_float(u[i] << 16), s[2 * i]);
    s[2 * i + 1] = fmaf(w, __uint_as_float(u[i] & 0xffff0000u), s[2 * i + 1]);
  }
}
__device__ inline uint4 pk(float* s) {
  uint32_t u[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(u[i]) : "f"(s[2 * i + 1]), "f"(s[2 * i]));
  return make_uint4(u[0], u[1], u[2], u[3]);
}
// gather by warps: NS steps at once, NR rows at once
template <int PARTS, int NS, int NR, int W>
__global__ void __launch_bounds__(512)
    gath(const uint8_t* src, const int* rows, uint8_t* out, int T, int K) {
  int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  if (w >= W) return;
  int n = T * PARTS;
  constexpr int SP = STEPS / PARTS;
  for (int it = blockIdx.x + w * gridDim.x; it < n; it += W * gridDim.x) {
    int t = it / PARTS, p = it % PARTS;
    int r = 0;
    if (lane < K) r = rows[t * K + lane];
    for (int s0 = 0; s0 < SP; s0 += NS) {
      float s[NS][8] = {};
      for (int k = 0; k < K; k += NR) {
        uint4 v[NR][NS];
#pragma unroll
        for (int a = 0; a < NR; a++) {
          int rr = __shfl_sync(~0u, r, k + a);
#pragma unroll
          for (int i = 0; i < NS; i++)
            v[a][i] =
                ld(src + (size_t)rr * ROWB + ((p * SP + s0 + i) * 32 + lane) * 16);
        }
#pragma unroll
        for (int a = 0; a < NR; a++)
#pragma unroll
          for (int i = 0; i < NS; i++) addv(s[i], v[a][i], .125f);
      }
#pragma unroll
      for (int i = 0; i < NS; i++)
        *(uint4*)(out + (size_t)t * ROWB + ((p * SP + s0 + i) * 32 + lane) * 16) =
            pk(s[i]);
    }
  }
}
// gather by blocks of 14 warps, 2 steps each, NR rows at once
template <int NR>
__global__ void __launch_bounds__(448)
    gathb(const uint8_t* src, const int* rows, uint8_t* out, int T, int K) {
  int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  for (int t = blockIdx.x; t < T; t += gridDim.x) {
    int r = 0;
    if (lane < K) r = rows[t * K + lane];
    float s[2][8] = {};
    for (int k = 0; k < K; k += NR) {
      uint4 v[NR][2];
#pragma unroll
      for (int a = 0; a < NR; a++) {
        int rr = __shfl_sync(~0u, r, k + a);
        for (int i = 0; i < 2; i++)
          v[a][i] = ld(src + (size_t)rr * ROWB + ((w * 2 + i) * 32 + lane) * 16);
      }
#pragma unroll
      for (int a = 0; a < NR; a++)
        for (int i = 0; i < 2; i++) addv(s[i], v[a][i], .125f);
    }
    for (int i = 0; i < 2; i++)
      *(uint4*)(out + (size_t)t * ROWB + ((w * 2 + i) * 32 + lane) * 16) = pk(s[i]);
  }
}
// gather by TMA: producer warp 14, consumers 0..13, ring of S rows
template <int S>
__global__ void __launch_bounds__(480)
    gatht(const uint8_t* src, const int* rows, uint8_t* out, int T, int K) {
  extern __shared__ __align__(128) uint8_t sm[];
  __shared__ uint64_t full[S], emp[S];
  int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S; i++) {
      mbi(full + i, 1);
      mbi(emp + i, 14);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int mine = (T - 1 - (int)blockIdx.x) / (int)gridDim.x + 1, n = mine * K;
  if (w == 14) {
    if (lane) return;
    for (int j = 0; j < n; j++) {
      int t = blockIdx.x + (j / K) * gridDim.x;
      int rr = rows[t * K + j % K];
      if (j >= S) mbw(emp + j % S, ((j / S) - 1) & 1);
      mbx(full + j % S, ROWB);
      g2s(sm + (size_t)(j % S) * ROWB, src + (size_t)rr * ROWB, ROWB, full + j % S);
    }
    return;
  }
  for (int m = 0, j = 0; m < mine; m++) {
    int t = blockIdx.x + m * gridDim.x;
    float s[2][8] = {};
    for (int k = 0; k < K; k++, j++) {
      mbw(full + j % S, (j / S) & 1);
      uint4 v[2];
      for (int i = 0; i < 2; i++)
        v[i] = *(uint4*)(sm + (size_t)(j % S) * ROWB + ((w * 2 + i) * 32 + lane) * 16);
      for (int i = 0; i < 2; i++) addv(s[i], v[i], .125f);
      __syncwarp();
      if (!lane) mba(emp + j % S);
    }
    for (int i = 0; i < 2; i++)
      *(uint4*)(out + (size_t)t * ROWB + ((w * 2 + i) * 32 + lane) * 16) = pk(s[i]);
  }
}
__global__ void rd(const uint4* p, size_t n, uint4* o) {
  uint4 a = {};
  for (size_t i = blockIdx.x * 512ull + threadIdx.x; i < n; i += gridDim.x * 512ull) {
    uint4 v = p[i];
    a.x ^= v.x;
    a.y ^= v.y;
    a.z ^= v.z;
    a.w ^= v.w;
  }
  if (a.x == 12345) *o = a;
}
__global__ void wr(uint4* p, size_t n) {
  uint4 a = {1, 2, 3, 4};
  for (size_t i = blockIdx.x * 512ull + threadIdx.x; i < n; i += gridDim.x * 512ull)
    p[i] = a;
}
uint8_t *tok, *dst, *out;
int* rows;
int T, K;
double bytes;
std::vector<uint32_t> chk(const uint8_t* p, size_t n) {
  std::vector<uint32_t> h(n / 4);
  CK(cudaMemcpy(h.data(), p, n, cudaMemcpyDeviceToHost));
  return h;
}
template <class F>
void run(const char* n, F f, double by) {
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<float> ts;
  for (int i = 0; i < 3; i++) f();
  CK(cudaDeviceSynchronize());
  for (int i = 0; i < 15; i++) {
    cudaEventRecord(a);
    f();
    f();
    cudaEventRecord(b);
    cudaEventSynchronize(b);
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    ts.push_back(ms * 500);
  }
  CK(cudaGetLastError());
  std::sort(ts.begin(), ts.end());
  printf("%-44s %7.1f us  %5.2f TB/s\n", n, ts[7], by / ts[7] / 1e6);
  fflush(stdout);
}
int main(int c, char** v) {
  int tt = c > 1 ? atoi(v[1]) : 8192, kk = c > 2 ? atoi(v[2]) : 4;
  T = tt;
  K = kk;
  int E = 256 / (8 / kk);
  size_t R = (size_t)T * K;
  CK(cudaMalloc(&tok, (size_t)T * ROWB));
  CK(cudaMalloc(&out, (size_t)T * ROWB));
  CK(cudaMalloc(&dst, R * ROWB));
  CK(cudaMalloc(&rows, R * 4));
  std::mt19937 g(1);
  std::vector<int> ex(R), cnt(E + 1), h(R);
  for (int t = 0; t < T; t++) {
    for (int k = 0; k < K; k++) {
    again:
      int e = g() % E;
      for (int j = 0; j < k; j++)
        if (ex[t * K + j] == e) goto again;
      ex[t * K + k] = e;
    }
  }
  for (int e : ex) cnt[e + 1]++;
  for (int e = 0; e < E; e++) cnt[e + 1] += cnt[e];
  for (size_t i = 0; i < R; i++) h[i] = cnt[ex[i]]++;
  CK(cudaMemcpy(rows, h.data(), R * 4, cudaMemcpyHostToDevice));
  CK(cudaMemset(tok, 0x3c, (size_t)T * ROWB));
  double sc = (double)(R + T) * ROWB;
  size_t nv = R * NV;
  printf("T %d K %d: %.0f MB\n", T, K, sc / 1e6);
  run(
      "memset of all rows", [&] { cudaMemsetAsync(dst, 1, R * ROWB); },
      R * (double)ROWB);
  run(
      "write kernel of all rows", [&] { wr<<<132 * 4, 512>>>((uint4*)dst, nv); },
      R * (double)ROWB);
  run(
      "read kernel of all rows",
      [&] { rd<<<132 * 4, 512>>>((uint4*)dst, nv, (uint4*)out); }, R * (double)ROWB);
  int G = 132;
#define S(...) \
  run(#__VA_ARGS__, [&] { __VA_ARGS__<<<G, 512>>>(tok, rows, dst, T, K); }, sc)
  S(scat<4, 0, 16>);
  S(scat<4, 0, 11>);
  S(scat<4, 0, 8>);
  S(scat<2, 0, 16>);
  S(scat<1, 0, 16>);
  S(scat<1, 0, 8>);
  S(scat<1, 0, 4>);
  S(scat<4, 1, 16>);
  S(scat<4, 2, 16>);
  S(scat<1, 1, 16>);
  S(scat<1, 2, 16>);
  S(scat<1, 1, 8>);
#define B(...) \
  run(#__VA_ARGS__, [&] { __VA_ARGS__<<<G, 448>>>(tok, rows, dst, T, K); }, sc)
  B(scatb<0>);
  B(scatb<1>);
  B(scatb<2>);
#define TM(W, S, P, C)                                                           \
  {                                                                              \
    auto f = scatt<W, S, P, C>;                                                  \
    int s = W * S * ROWB / P;                                                    \
    CK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, s)); \
    run(                                                                         \
        "TMA warps " #W " stages " #S " parts " #P " hint " #C,                  \
        [&] { f<<<G, 512, s>>>(tok, rows, dst, T, K); }, sc);                    \
  }
  TM(1, 2, 1, 0)
  TM(1, 4, 1, 0) TM(1, 8, 1, 0) TM(1, 14, 1, 0) TM(2, 4, 1, 0) TM(4, 3, 1, 0)
      TM(1, 8, 4, 0) TM(2, 8, 4, 0) TM(4, 8, 4, 0) TM(1, 4, 1, 1) TM(1, 8, 1, 1)
          TM(2, 4, 1, 1) TM(4, 2, 4, 0) TM(8, 2, 2, 0) sc = (double)(R + T) * ROWB;
#define GA(...) \
  run(#__VA_ARGS__, [&] { __VA_ARGS__<<<G, 512>>>(dst, rows, out, T, K); }, sc)
  GA(gath<7, 4, 2, 16>);
  GA(gath<7, 4, 2, 8>);
  GA(gath<7, 4, 1, 16>);
  GA(gath<7, 2, 4, 16>);
  GA(gath<4, 7, 1, 16>);
  GA(gath<1, 4, 2, 16>);
  GA(gath<1, 4, 2, 8>);
  GA(gath<1, 7, 1, 16>);
  GA(gath<14, 2, 4, 16>);
  GA(gath<28, 1, 4, 16>);
  GA(gath<7, 4, 4, 16>);
  GA(gath<7, 4, 4, 8>);
  GA(gath<1, 4, 4, 8>);
#define GB(...) \
  run(#__VA_ARGS__, [&] { __VA_ARGS__<<<G, 448>>>(dst, rows, out, T, K); }, sc)
  GB(gathb<2>);
  GB(gathb<4>);
#define GT(S)                                                                        \
  {                                                                                  \
    auto f = gatht<S>;                                                               \
    int s = S * ROWB;                                                                \
    CK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, s));     \
    run("TMA gather ring " #S, [&] { f<<<G, 480, s>>>(dst, rows, out, T, K); }, sc); \
  }
  GT(2)
  GT(4) GT(8) GT(12) GT(15)
      // check: scatter by each kind gives the same
      CK(cudaMemset(dst, 0, R * ROWB));
  {
    std::vector<uint8_t> hh((size_t)T * ROWB);
    for (auto& x : hh) x = g() & 0x3f;
    CK(cudaMemcpy(tok, hh.data(), hh.size(), cudaMemcpyHostToDevice));
  }
  scat<4, 0, 16><<<G, 512>>>(tok, rows, dst, T, K);
  auto a = chk(dst, R * ROWB);
  CK(cudaMemset(dst, 0, R * ROWB));
  {
    auto f = scatt<1, 8, 1, 0>;
    f<<<G, 512, 8 * ROWB>>>(tok, rows, dst, T, K);
  }
  auto b = chk(dst, R * ROWB);
  printf("scatter same %d\n", a == b);
  gath<7, 4, 2, 16><<<G, 512>>>(dst, rows, out, T, K);
  auto x = chk(out, (size_t)T * ROWB);
  CK(cudaMemset(out, 0, (size_t)T * ROWB));
  {
    auto f = gatht<8>;
    f<<<G, 480, 8 * ROWB>>>(dst, rows, out, T, K);
  }
  auto y = chk(out, (size_t)T * ROWB);
  printf("gather same %d\n", x == y);
}
