// Torch's C interface made safe to use: owned inputs and outputs, described tensors, readable errors.
//
// Only register.cpp includes this, so everything is internal to it. Knows nothing of attention.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "torch_abi.h"

namespace poise {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error("poise: " + text); }

void check(Status status, const char* doing) {
  if (status != 0) fail(std::string("torch failed to ") + doing);
}

struct TorchTypes {
  int32_t cpu = aoti_torch_device_type_cpu();
  int32_t f32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16();
  int32_t f64 = aoti_torch_dtype_float64();  // only ever refused
  int32_t i32 = aoti_torch_dtype_int32(), i64 = aoti_torch_dtype_int64(), boolean = aoti_torch_dtype_bool();
  int32_t i8 = aoti_torch_dtype_int8();
};
const TorchTypes torch_types;

const char* type_name(int32_t dtype) {
  const TorchTypes& t = torch_types;
  return dtype == t.f32       ? "float32"
         : dtype == t.bf16    ? "bfloat16"
         : dtype == t.f16     ? "float16"
         : dtype == t.f64     ? "float64"
         : dtype == t.i32     ? "int32"
         : dtype == t.i64     ? "int64"
         : dtype == t.boolean ? "bool"
         : dtype == t.i8      ? "int8"
                              : "another dtype";
}

// The boxed arguments of one call, read in schema order. Reading never throws, so every tensor is owned, and freed at
// the end, before the first check can fail.
class Inputs {
 public:
  explicit Inputs(Value* stack) : next_(stack) {}
  Inputs(const Inputs&) = delete;
  ~Inputs() {
    for (int i = 0; i < owned_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  }
  Value* rest() const { return next_; }  // what follows the arguments read so far
  int64_t last_integer() { return integer(); }

 protected:
  TensorHandle tensor() { return own(*next_++); }
  TensorHandle optional_tensor() {
    Value* slot = optional();
    if (slot == nullptr) return nullptr;
    TensorHandle handle = own(*slot);
    delete slot;
    return handle;
  }
  double number() { return number_of(*next_++); }
  double optional_number(double otherwise) {
    Value* slot = optional();
    if (slot == nullptr) return otherwise;
    double value = number_of(*slot);
    delete slot;
    return value;
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  int64_t optional_integer(int64_t otherwise) {
    Value* slot = optional();
    if (slot == nullptr) return otherwise;
    const int64_t value = static_cast<int64_t>(*slot);
    delete slot;
    return value;
  }
  bool flag() { return (*next_++ & 1) != 0; }

 private:
  Value* optional() { return reinterpret_cast<Value*>(*next_++); }
  TensorHandle own(Value value) { return tensors_[owned_++] = reinterpret_cast<TensorHandle>(value); }
  static double number_of(Value value) {
    double number;
    std::memcpy(&number, &value, sizeof number);
    return number;
  }

  Value* next_;
  TensorHandle tensors_[24];
  int owned_ = 0;
};

// A tensor made here; freed unless given to the caller.
class Output {
 public:
  Output(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    check(aoti_torch_empty_strided(dim, sizes, strides, dtype, torch_types.cpu, 0, &handle_), "allocate an output");
  }
  Output(Output&& other) : handle_(other.handle_) { other.handle_ = nullptr; }
  ~Output() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  template <typename T>
  T* data() const {
    void* data = nullptr;
    check(aoti_torch_get_data_ptr(handle_, &data), "read an output's address");
    return static_cast<T*>(data);
  }
  Value release() {
    Value value = reinterpret_cast<Value>(handle_);
    handle_ = nullptr;
    return value;
  }

 private:
  TensorHandle handle_ = nullptr;
};

// A tensor's description. Sizes and strides are torch's own memory, valid while the tensor lives.
struct View {
  const char* name;
  int64_t dim;
  int64_t *sizes, *strides;
  int32_t dtype;
  const void* data;

  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  // Broadcast dims get stride 0, whatever torch keeps for a dim of size 1.
  int64_t stride(int64_t axis) const { return sizes[axis] == 1 ? 0 : strides[axis]; }
  [[noreturn]] void refuse(const std::string& rule) const {
    std::string shape;
    for (int64_t i = 0; i < dim; ++i) shape += (i ? ", " : "") + std::to_string(sizes[i]);
    fail(std::string(name) + " " + rule + "; got " + type_name(dtype) + " [" + shape + "]");
  }
  void expect_size(int64_t axis, int64_t size, bool broadcasts = false) const {
    if (sizes[axis] == size || (broadcasts && sizes[axis] == 1)) return;
    refuse("must have size " + std::to_string(size) + (broadcasts ? " or 1" : "") + " in dim " + std::to_string(axis));
  }
  // The dims from `axis` on lie in memory as one contiguous block.
  void expect_packed(int64_t axis) const {
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] == 0) return;  // nothing lies anywhere
    int64_t step = 1;
    for (int64_t i = dim - 1; i >= axis; --i) {
      if (sizes[i] > 1 && strides[i] != step) refuse("must be contiguous from dim " + std::to_string(axis) + " on");
      step *= sizes[i];
    }
  }
};

View view(TensorHandle handle, const char* name, int64_t dim) {
  View v{name, 0, nullptr, nullptr, 0, nullptr};
  int32_t device = 0;
  check(aoti_torch_get_dim(handle, &v.dim), "read a tensor's rank");
  check(aoti_torch_get_sizes(handle, &v.sizes), "read a tensor's sizes");
  check(aoti_torch_get_strides(handle, &v.strides), "read a tensor's strides");
  check(aoti_torch_get_dtype(handle, &v.dtype), "read a tensor's dtype");
  check(aoti_torch_get_device_type(handle, &device), "read a tensor's device");
  if (device != torch_types.cpu) v.refuse("must be on the CPU");
  if (v.dim != dim) v.refuse("must have " + std::to_string(dim) + " dims");
  check(torch_get_const_data_ptr(handle, &v.data), "read a tensor's address");
  return v;
}

View view(TensorHandle handle, const char* name, int64_t dim, int32_t dtype) {
  View v = view(handle, name, dim);
  if (v.dtype != dtype) v.refuse(std::string("must be ") + type_name(dtype));
  return v;
}

// One value per entry of dim 0, packed.
template <typename T>
const T* list(TensorHandle handle, const char* name, int32_t dtype, int64_t size) {
  if (handle == nullptr) return nullptr;
  View v = view(handle, name, 1, dtype);
  v.expect_size(0, size);
  v.expect_packed(0);
  return v.as<T>();
}

}  // namespace
}  // namespace poise
