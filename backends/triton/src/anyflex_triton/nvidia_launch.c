/* Launcher of a kernel of CUDA's driver: the parameters that its launches share are laid out once,
 * and a launch writes a call's addresses and numbers over a copy of them.
 *
 * Compiled on the machine that runs it, by the compiler of Triton's own launchers: see
 * nvidia_launch.py.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Alignment of a descriptor: the driver asks for 64, the type of some of its headers for more. */
#define ALIGNMENT 128

typedef CUresult (*GetCurrent)(CUcontext *);
typedef CUresult (*GetErrorString)(CUresult, const char **);
typedef CUresult (*LaunchKernel)(const CUlaunchConfig *, CUfunction, void **, void **);
typedef CUresult (*ReplaceAddress)(CUtensorMap *, void *);
typedef CUresult (*GetParamInfo)(CUfunction, size_t, size_t *, size_t *);

static struct {
  GetCurrent get_current;
  GetErrorString get_error_string;
  LaunchKernel launch;
  ReplaceAddress replace_address;
  GetParamInfo get_param_info; /* since CUDA 12.4, else NULL */
} driver;

static PyObject *data_ptr;

/* Kind of a call's value: a tensor's address; the address in an otherwise fixed descriptor;
 * numbers. */
typedef enum { POINTER = 'P', ADDRESS = 'A', INT32 = 'i', INT64 = 'q', FLOAT = 'f' } Kind;

typedef struct {
  PyObject *name;     /* of the call's value */
  Py_ssize_t element; /* of a tuple; -1: the value itself */
  Py_ssize_t offset;
  Py_ssize_t begin; /* bytes from the value's address to the parameter's */
  Kind kind;
} Slot;

typedef struct {
  Py_ssize_t offset, size;
} Place;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  CUfunction function;
  unsigned threads, shared;
  int overlaps; /* whether it may begin before the launch before it ends */
  Py_ssize_t bytes, parameters, slots;
  unsigned char *fixed; /* of the parameters, one after the other; aligned */
  Place *place;         /* in it, of each */
  Slot *slot;
} Launch;

static PyObject *failed(const char *what, CUresult status) {
  const char *text = NULL;
  driver.get_error_string(status, &text);
  PyErr_Format(PyExc_RuntimeError, "%s: CUDA error %d, %s", what, (int)status,
               text == NULL ? "unknown" : text);
  return NULL;
}

/* 0, or -1 with an exception. */
static int address_of(PyObject *tensor, void **address) {
  PyObject *found = PyObject_CallMethodNoArgs(tensor, data_ptr);
  if (found == NULL)
    return -1;
  *address = PyLong_AsVoidPtr(found);
  Py_DECREF(found);
  return *address == NULL && PyErr_Occurred() ? -1 : 0;
}

/* Writes one value over the parameters. `address` is the value's where `known`. */
static int write_slot(const Slot *slot, PyObject *value, void **address, int *known,
                      unsigned char *parameters) {
  unsigned char *there = parameters + slot->offset;
  if (slot->element >= 0) {
    if (!PyTuple_Check(value) || slot->element >= PyTuple_GET_SIZE(value)) {
      PyErr_Format(PyExc_TypeError, "%U has no element %zd", slot->name, slot->element);
      return -1;
    }
    value = PyTuple_GET_ITEM(value, slot->element);
    *known = 0;
  }
  switch (slot->kind) {
  case POINTER:
  case ADDRESS:
    if (!*known && address_of(value, address) < 0)
      return -1;
    *known = 1;
    void *begin = (char *)*address + slot->begin;
    if (slot->kind == POINTER) {
      memcpy(there, &begin, sizeof begin);
    } else {
      CUresult status = driver.replace_address((CUtensorMap *)there, begin);
      if (status != CUDA_SUCCESS) {
        failed("a descriptor's address", status);
        return -1;
      }
    }
    return 0;
  case INT32:
  case INT64: {
    int64_t wide = PyLong_AsLongLong(value);
    if (wide == -1 && PyErr_Occurred())
      return -1;
    int32_t narrow = (int32_t)wide;
    if (slot->kind == INT64) {
      memcpy(there, &wide, sizeof wide);
    } else if (narrow == wide) {
      memcpy(there, &narrow, sizeof narrow);
    } else {
      PyErr_Format(PyExc_OverflowError, "%U is %lld: more than 32 bits", slot->name,
                   (long long)wide);
      return -1;
    }
    return 0;
  }
  case FLOAT: {
    double wide = PyFloat_AsDouble(value);
    if (wide == -1.0 && PyErr_Occurred())
      return -1;
    float narrow = (float)wide;
    memcpy(there, &narrow, sizeof narrow);
    return 0;
  }
  }
  return 0;
}

/* launch(grid, stream, values): whether it was launched; False: this thread has no context yet. */
static PyObject *launch_call(PyObject *self, PyObject *const *given, size_t Py_UNUSED(count),
                             PyObject *Py_UNUSED(names)) {
  const Launch *launch = (Launch *)self;
  CUcontext context = NULL;
  CUresult status = driver.get_current(&context);
  if (status != CUDA_SUCCESS && status != CUDA_ERROR_NOT_INITIALIZED)
    return failed("the current context", status);
  if (context == NULL)
    Py_RETURN_FALSE;
  unsigned long grid = PyLong_AsUnsignedLong(given[0]);
  if (grid == (unsigned long)-1 && PyErr_Occurred())
    return NULL;
  if (grid > INT32_MAX) {
    PyErr_Format(PyExc_OverflowError, "a grid of %lu programs: 2^31 - 1 are the most", grid);
    return NULL;
  }
  /* The driver refuses a grid without programs. */
  if (grid == 0)
    Py_RETURN_TRUE;
  void *stream = PyLong_AsVoidPtr(given[1]);
  if (stream == NULL && PyErr_Occurred())
    return NULL;

  _Alignas(ALIGNMENT) unsigned char parameters[launch->bytes];
  void *places[launch->parameters];
  memcpy(parameters, launch->fixed, launch->bytes);
  for (Py_ssize_t i = 0; i < launch->parameters; ++i)
    places[i] = parameters + launch->place[i].offset;
  const PyObject *name = NULL;
  PyObject *value = NULL;
  void *address = NULL;
  int known = 0;
  for (Py_ssize_t i = 0; i < launch->slots; ++i) {
    const Slot *slot = launch->slot + i;
    if (slot->name != name) {
      name = slot->name;
      known = 0;
      value = PyDict_GetItemWithError(given[2], slot->name);
      if (value == NULL) {
        if (!PyErr_Occurred())
          PyErr_SetObject(PyExc_KeyError, slot->name);
        return NULL;
      }
    }
    if (write_slot(slot, value, &address, &known, parameters) < 0)
      return NULL;
  }
  CUlaunchAttribute overlaps = {
      .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
      .value.programmaticStreamSerializationAllowed = 1,
  };
  CUlaunchConfig config = {
      .gridDimX = (unsigned)grid, .gridDimY = 1, .gridDimZ = 1,
      .blockDimX = launch->threads, .blockDimY = 1, .blockDimZ = 1,
      .sharedMemBytes = launch->shared, .hStream = (CUstream)stream,
      .attrs = &overlaps, .numAttrs = launch->overlaps ? 1 : 0,
  };
  /* The driver waits for the device where its queue is full. */
  Py_BEGIN_ALLOW_THREADS
  status = driver.launch(&config, launch->function, places, NULL);
  Py_END_ALLOW_THREADS
  if (status != CUDA_SUCCESS)
    return failed("launching a kernel", status);
  Py_RETURN_TRUE;
}

/* Whether the driver knows parameters of these sizes, where it can tell. It isn't asked for a
 * parameter past the last: tools that watch its calls would report the error. */
static int check_sizes(const Launch *launch) {
  if (driver.get_param_info == NULL)
    return 0;
  for (Py_ssize_t i = 0; i < launch->parameters; ++i) {
    size_t offset, size = 0;
    if (driver.get_param_info(launch->function, (size_t)i, &offset, &size) != CUDA_SUCCESS)
      size = 0;
    size_t ours = (size_t)launch->place[i].size;
    if (size != ours) {
      PyErr_Format(PyExc_RuntimeError, "the kernel's parameter %zd has %zu bytes, not %zu", i,
                   size, ours);
      return -1;
    }
  }
  return 0;
}

static void launch_dealloc(PyObject *self) {
  Launch *launch = (Launch *)self;
  for (Py_ssize_t i = 0; i < launch->slots; ++i)
    Py_XDECREF(launch->slot[i].name);
  PyMem_Free(launch->slot);
  PyMem_Free(launch->place);
  free(launch->fixed);
  Py_TYPE(self)->tp_free(self);
}

/* Launch(function, threads, shared, overlaps, fixed, places, slots), from `Parameters.launcher`.
 *
 * overlaps: see dependent_launch.py. fixed: bytes of all parameters. places: (offset, size) in it, of
 * each. slots: (name, element, kind, offset, begin). */
static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names)) {
  unsigned long long function;
  unsigned threads, shared;
  int overlaps;
  const char *fixed;
  Py_ssize_t bytes;
  PyObject *places, *slots;
  if (!PyArg_ParseTuple(args, "KIIpy#O!O!", &function, &threads, &shared, &overlaps, &fixed,
                        &bytes, &PyTuple_Type, &places, &PyTuple_Type, &slots))
    return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(places);
  Launch *launch = (Launch *)type->tp_alloc(type, 0);
  if (launch == NULL)
    return NULL;
  launch->call = launch_call;
  launch->function = (CUfunction)(uintptr_t)function;
  launch->threads = threads;
  launch->shared = shared;
  launch->overlaps = overlaps;
  launch->bytes = bytes;
  launch->parameters = count;
  size_t whole = ((size_t)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  launch->fixed = aligned_alloc(ALIGNMENT, whole);
  launch->place = PyMem_Calloc((size_t)count, sizeof *launch->place);
  launch->slot = PyMem_Calloc((size_t)PyTuple_GET_SIZE(slots) + 1, sizeof *launch->slot);
  if (launch->fixed == NULL || launch->place == NULL || launch->slot == NULL) {
    PyErr_NoMemory();
    goto broken;
  }
  memcpy(launch->fixed, fixed, (size_t)bytes);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Place *place = launch->place + i;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "nn", &place->offset, &place->size))
      goto broken;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    Slot *slot = launch->slot + i;
    int kind;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "UnCnn", &slot->name, &slot->element,
                          &kind, &slot->offset, &slot->begin)) {
      slot->name = NULL;
      goto broken;
    }
    Py_INCREF(slot->name);
    launch->slots = i + 1;
    slot->kind = (Kind)kind;
  }
  if (check_sizes(launch) < 0)
    goto broken;
  return (PyObject *)launch;
broken:
  Py_DECREF(launch);
  return NULL;
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "anyflex_nvidia_launch.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_dealloc = launch_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = launch_new,
};

/* open_driver(path): takes the driver's functions from this library. */
static PyObject *open_driver(PyObject *Py_UNUSED(module), PyObject *path) {
  const char *name = PyUnicode_AsUTF8(path);
  if (name == NULL)
    return NULL;
  void *library = dlopen(name, RTLD_LAZY);
  if (library == NULL)
    return PyErr_Format(PyExc_OSError, "%s", dlerror());
  driver.get_current = (GetCurrent)dlsym(library, "cuCtxGetCurrent");
  driver.get_error_string = (GetErrorString)dlsym(library, "cuGetErrorString");
  driver.launch = (LaunchKernel)dlsym(library, "cuLaunchKernelEx");
  driver.replace_address = (ReplaceAddress)dlsym(library, "cuTensorMapReplaceAddress");
  driver.get_param_info = (GetParamInfo)dlsym(library, "cuFuncGetParamInfo");
  if (driver.get_current == NULL || driver.get_error_string == NULL || driver.launch == NULL ||
      driver.replace_address == NULL)
    return PyErr_Format(PyExc_OSError, "%s has no cuLaunchKernelEx or no tensor maps", name);
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"open_driver", open_driver, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "anyflex_nvidia_launch", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit_anyflex_nvidia_launch(void) {
  data_ptr = PyUnicode_InternFromString("data_ptr");
  if (data_ptr == NULL)
    return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module == NULL || PyModule_AddType(module, &LaunchType) < 0)
    return NULL;
  return module;
}
