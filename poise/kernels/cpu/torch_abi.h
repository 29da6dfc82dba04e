// What poise uses of torch's stable C interface, declared here so that building needs no torch.
//
// Every function below is exported by libtorch_cpu from torch 2.10 on. CMake reads the names in this file to make the
// stub library that register.cpp links against, so one function per declaration, its name followed by "(". A function
// returning Status gives 0 on success; the text of a failure went to torch's own log.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

using Status = int32_t;
using Value = uint64_t;  // one slot of a boxed call: a number, a bool, a pointer, or for T? a pointer to a slot or null
struct TensorObject;
struct LibraryObject;
using TensorHandle = TensorObject*;
using LibraryHandle = LibraryObject*;
using Kernel = void (*)(Value* stack, uint64_t num_inputs, uint64_t num_outputs);
using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// Registration. The library objects live as long as the process: freeing one unregisters its operators.
Status aoti_torch_library_init_def(const char* ns, const char* file, uint32_t line, LibraryHandle* made);
Status aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                    LibraryHandle* made);
Status aoti_torch_library_def(LibraryHandle library, const char* schema);
Status torch_library_impl(LibraryHandle library, const char* name, Kernel kernel, uint64_t built_for);

// Tensors. Inputs of a boxed call are owned by the callee; sizes and strides are borrowed from the tensor.
Status aoti_torch_delete_tensor_object(TensorHandle tensor);
Status aoti_torch_get_dim(TensorHandle tensor, int64_t* dim);
Status aoti_torch_get_sizes(TensorHandle tensor, int64_t** sizes);
Status aoti_torch_get_strides(TensorHandle tensor, int64_t** strides);
Status aoti_torch_get_dtype(TensorHandle tensor, int32_t* dtype);
Status aoti_torch_get_device_type(TensorHandle tensor, int32_t* device_type);
Status aoti_torch_get_data_ptr(TensorHandle tensor, void** data);
Status torch_get_const_data_ptr(TensorHandle tensor, const void** data);
Status aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                int32_t device_type, int32_t device_index, TensorHandle* made);

// The numbers torch gives to its dtypes and devices.
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_device_type_cpu();

// Threads: torch's own pool.
Status torch_get_num_threads(uint32_t* count);
Status torch_parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);

}  // extern "C"

// The oldest interface this binary speaks, 2.10: major << 56 | minor << 48.
constexpr uint64_t kTorchAbi = (uint64_t(2) << 56) | (uint64_t(10) << 48);
