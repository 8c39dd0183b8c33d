/* Fake of CUDA's driver for launchers, on a machine that has none: it records the last launch,
 * whose parameters are copied with the sizes that the kernel has. */

#include <cuda.h>
#include <string.h>

typedef struct {
  /* Parameters of a kernel. */
  int count;
  int sizes[64];
} Kernel;

static int has_context = 1;
static int status_of_launch;
static struct {
  unsigned grid, threads, shared, launches, overlaps;
  unsigned long long stream;
  unsigned char parameters[8192];
  int bytes;
} last;

void set_context(int there) { has_context = there; }
void set_status(int status) { status_of_launch = status; }
const void *last_launch(void) { return &last; }
void forget(void) { memset(&last, 0, sizeof last); }

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = has_context ? (CUcontext)&has_context : NULL;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult status, const char **text) {
  *text = status == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES ? "too many resources" : NULL;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  (void)attribute;
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  const Kernel *kernel = (const Kernel *)function;
  if (index >= (size_t)kernel->count)
    return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = (size_t)kernel->sizes[index];
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  const Kernel *kernel = (const Kernel *)function;
  if (status_of_launch)
    return status_of_launch;
  if (extra != NULL || config->gridDimX == 0 || config->gridDimY != 1 || config->gridDimZ != 1 ||
      config->numAttrs > 1)
    return CUDA_ERROR_INVALID_VALUE;
  if (config->numAttrs &&
      (config->attrs->id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
       config->attrs->value.programmaticStreamSerializationAllowed != 1))
    return CUDA_ERROR_INVALID_VALUE;
  last.grid = config->gridDimX;
  last.threads = config->blockDimX;
  last.shared = config->sharedMemBytes;
  last.stream = (unsigned long long)config->hStream;
  last.bytes = 0;
  last.launches += 1;
  last.overlaps = config->numAttrs;
  for (int i = 0; i < kernel->count; ++i) {
    memcpy(last.parameters + last.bytes, parameters[i], (size_t)kernel->sizes[i]);
    last.bytes += kernel->sizes[i];
  }
  return CUDA_SUCCESS;
}

/* Contents of a fake descriptor: address, type, rank, swizzle, then lengths, strides, boxes. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *lengths,
                                const cuuint64_t *strides, const cuuint32_t *boxes,
                                const cuuint32_t *ones, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  unsigned long long *words = (unsigned long long *)map;
  if ((size_t)map % 64 || interleave || promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_128B || fill)
    return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  words[0] = (unsigned long long)address;
  words[1] = ((unsigned long long)type << 32) | rank << 8 | swizzle;
  for (unsigned i = 0; i < rank; ++i) {
    if (ones[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    words[2 + i] = lengths[i] | (unsigned long long)boxes[i] << 32;
    if (i + 1 < rank)
      words[8 + i] = strides[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  if ((size_t)map % 64 || (size_t)address % 16)
    return CUDA_ERROR_INVALID_VALUE;
  *(unsigned long long *)map = (unsigned long long)address;
  return CUDA_SUCCESS;
}
