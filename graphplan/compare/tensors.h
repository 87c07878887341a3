// What tensors are like, and where they lie.

#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace graphplan {

// So many things ahead are asked of memory before they are compared: of thousands, most are in no cache near by.
constexpr size_t kAhead = 8;

inline void prefetch(const void* place) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(place);
#endif
}

// As long as a cache line.
struct Fact {
  PyTypeObject* type;
  uint64_t keys;
  const void* memory;
  int64_t offset;
  // Where all that was found. Only hints: nothing is read but what the tensor itself leads to.
  const c10::TensorImpl* impl;
  const c10::StorageImpl* storage;
  const void* meta;
  int32_t ndim;
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  bool bare;
};

// What some tensors were like. Sizes and strides of all lie one after another, as they are read.
struct Facts {
  std::vector<Fact> of;
  std::vector<int64_t> dims;
  bool placed = false;

  ~Facts() {
    for (const Fact& fact : of) {
      Py_DECREF(fact.type);
    }
  }
};

struct Tensors {
  PyObject_HEAD
  Facts* facts;
};

// Whether memory, sizes and strides are the tensor's own: a wrapper (DTensor) asks Python for them, or has none.
inline bool is_dense(const at::Tensor& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided && tensor.has_storage() &&
      !tensor.is_nested();
}

inline const void* memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->data();
}

// Whether code has hung an attribute on the tensor.
inline bool is_bare(PyObject* item) {
  PyObject** attributes = _PyObject_GetDictPtr(item);
  return attributes == nullptr || *attributes == nullptr || PyDict_GET_SIZE(*attributes) == 0;
}

inline void add(Facts& facts, PyObject* item, const at::Tensor& tensor) {
  // Kept, so that no other class can come to lie where it does.
  Py_INCREF(Py_TYPE(item));
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  facts.of.push_back({Py_TYPE(item), tensor.key_set().raw_repr(), memory_of(tensor), tensor.storage_offset(), impl,
                      tensor.storage().unsafeGetStorageImpl(), impl->autograd_meta(),
                      static_cast<int32_t>(tensor.dim()), tensor.scalar_type(), tensor.device(),
                      tensor.requires_grad(), is_bare(item)});
  for (int64_t size : tensor.sizes()) {
    facts.dims.push_back(size);
  }
  for (int64_t stride : tensor.strides()) {
    facts.dims.push_back(stride);
  }
}

inline void prefetch(const Fact& fact, const PyObject* item, bool placed) {
  const char* impl = reinterpret_cast<const char*>(fact.impl);
  prefetch(item);
  for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) {
    prefetch(impl + line);
  }
  if (fact.meta != nullptr) {
    prefetch(fact.meta);
  }
  if (placed) {
    prefetch(fact.storage);
  }
}

// Whether `item` is as `fact` says. The same dispatch keys mean the same layout, and memory of its own.
inline bool fits(const Fact& fact, const int64_t* dims, PyObject* item, bool placed) {
  if (Py_TYPE(item) != fact.type) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(item);
  if (tensor.key_set().raw_repr() != fact.keys || tensor.dim() != fact.ndim) {
    return false;
  }
  if (placed && (memory_of(tensor) != fact.memory || tensor.storage_offset() != fact.offset)) {
    return false;
  }
  // Attributes of what is owned are compared one by one.
  if (!placed && fact.bare && !is_bare(item)) {
    return false;
  }
  const auto ndim = static_cast<size_t>(fact.ndim);
  return tensor.sizes() == c10::IntArrayRef(dims, ndim) && tensor.strides() == c10::IntArrayRef(dims + ndim, ndim) &&
      tensor.scalar_type() == fact.dtype && tensor.device() == fact.device &&
      (tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor.requires_grad()) == fact.requires_grad;
}

inline bool fit(const Facts& facts, PyObject* list) {
  const size_t count = facts.of.size();
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(count)) {
    return false;
  }
  const int64_t* dims = facts.dims.data();
  for (size_t i = 0; i < count; i++) {
    if (i + kAhead < count) {
      prefetch(facts.of[i + kAhead], PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i + kAhead)), facts.placed);
    }
    const Fact& fact = facts.of[i];
    if (!fits(fact, dims, PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)), facts.placed)) {
      return false;
    }
    dims += 2 * fact.ndim;
  }
  return true;
}

inline PyObject* tensors_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* list;
  int placed;
  if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &list, &placed)) {
    return nullptr;
  }
  auto facts = std::make_unique<Facts>();
  facts->placed = placed;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!THPVariable_Check(item) || !is_dense(THPVariable_Unpack(item))) {
      PyErr_SetString(PyExc_TypeError, "only dense tensors are compared here");
      return nullptr;
    }
    add(*facts, item, THPVariable_Unpack(item));
  }
  auto* self = reinterpret_cast<Tensors*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->facts = facts.release();
  }
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

inline void tensors_dealloc(PyObject* self) {
  delete reinterpret_cast<Tensors*>(self)->facts;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* tensors_fit(PyObject* self, PyObject* list) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(fit(*reinterpret_cast<Tensors*>(self)->facts, list));
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef tensors_methods[] = {{"fit", tensors_fit, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot tensors_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tensors_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tensors_dealloc)},
    {Py_tp_methods, tensors_methods},
    {0, nullptr}};
inline PyType_Spec tensors_spec = {"graphplan_guards.Tensors", sizeof(Tensors), 0, Py_TPFLAGS_DEFAULT, tensors_slots};

}  // namespace graphplan
