// Properties and addresses of tensors.

#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace graphplan {

// How many items ahead of a comparison memory is prefetched: of thousands of items, most are in no near cache.
constexpr size_t kAhead = 8;

inline void prefetch(const void* place) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(place);
#endif
}

// All properties of a tensor except its address. Thousands of tensors share a few kinds, which stay in the cache.
struct Kind {
  PyTypeObject* type;
  uint64_t keys;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  bool bare;

  bool operator==(const Kind&) const = default;
};

struct Fact {
  const void* memory;
  int64_t offset;
  size_t kind;
  // Where the facts were found. Unless the tensor is held, these are only prefetch hints and are never dereferenced.
  const PyObject* item;
  const c10::TensorImpl* impl;
  const c10::StorageImpl* storage;
};

// The recorded properties of some tensors.
struct Facts {
  std::vector<Kind> kinds;
  std::vector<Fact> of;
  bool placed = false;
  // Only addresses are compared. The tensors are held, so that no other tensor can reuse the address of one.
  bool alone = false;
  std::vector<at::Tensor> held;

  ~Facts() {
    for (const Kind& kind : kinds) {
      Py_DECREF(kind.type);
    }
  }
};

struct Tensors {
  PyObject_HEAD
  Facts* facts;
};

// Returns whether a tensor has its own memory, sizes and strides: a wrapper (DTensor) asks Python for them or has none.
inline bool is_dense(const at::Tensor& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided && tensor.has_storage() &&
      !tensor.is_nested();
}

inline const void* memory_of(const c10::TensorImpl* impl) {
  return impl->unsafe_storage().unsafeGetStorageImpl()->data();
}

// Returns whether code has set no attribute on the tensor.
inline bool is_bare(PyObject* item) {
  PyObject** attributes = _PyObject_GetDictPtr(item);
  return attributes == nullptr || *attributes == nullptr || PyDict_GET_SIZE(*attributes) == 0;
}

inline bool requires_grad(const c10::TensorImpl* impl) {
  return const_cast<c10::TensorImpl*>(impl)->autograd_meta() != nullptr && impl->requires_grad();
}

inline void add(Facts& facts, PyObject* item, const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  Kind kind{Py_TYPE(item), tensor.key_set().raw_repr(), tensor.sizes().vec(), tensor.strides().vec(),
            tensor.scalar_type(), tensor.device(), requires_grad(impl), is_bare(item)};
  // Search from the end, because neighbours are alike.
  const auto found = std::find(facts.kinds.rbegin(), facts.kinds.rend(), kind);
  size_t place = static_cast<size_t>(facts.kinds.rend() - found);
  if (place == 0) {
    // The class is kept alive, so that no other class can reuse its address.
    Py_INCREF(kind.type);
    facts.kinds.push_back(std::move(kind));
    place = facts.kinds.size();
  }
  facts.of.push_back({memory_of(impl), tensor.storage_offset(), place - 1, item, impl,
                      impl->unsafe_storage().unsafeGetStorageImpl()});
  if (facts.alone) {
    facts.held.push_back(tensor);
  }
}

inline bool equal(c10::IntArrayRef found, const std::vector<int64_t>& known) {
  if (found.size() != known.size()) {
    return false;
  }
  for (size_t i = 0; i < found.size(); i++) {
    if (found[i] != known[i]) {
      return false;
    }
  }
  return true;
}

inline void prefetch(const Fact& fact, const PyObject* item, bool alone) {
  const char* impl = reinterpret_cast<const char*>(fact.impl);
  prefetch(alone ? nullptr : item);
  for (size_t line = 0; line < (alone ? 64 : sizeof(c10::TensorImpl)); line += 64) {
    prefetch(impl + line);
  }
  prefetch(fact.storage);
}

// Returns whether `item` is the held tensor with the recorded memory. This reads two places in memory, `fits` seven.
inline bool lies(const Fact& fact, const PyObject* item) {
  const c10::StorageImpl* storage = fact.impl->unsafe_storage().unsafeGetStorageImpl();
  return item == fact.item && storage == fact.storage && storage->data() == fact.memory;
}

// Returns whether `item` has the recorded properties. Equal dispatch keys imply one layout, and memory of its own.
inline bool fits(const Fact& fact, const Kind& kind, PyObject* item, bool placed) {
  if (Py_TYPE(item) != kind.type) {
    return false;
  }
  const c10::TensorImpl* impl = THPVariable_Unpack(item).unsafeGetTensorImpl();
  if (impl->key_set().raw_repr() != kind.keys) {
    return false;
  }
  if (placed && (memory_of(impl) != fact.memory || impl->storage_offset() != fact.offset)) {
    return false;
  }
  // The attributes of tensors with known addresses, which owners hold, are compared one by one.
  if (!placed && kind.bare && !is_bare(item)) {
    return false;
  }
  return equal(impl->sizes(), kind.sizes) && equal(impl->strides(), kind.strides) &&
      impl->dtype().toScalarType() == kind.dtype && impl->device() == kind.device &&
      requires_grad(impl) == kind.requires_grad;
}

inline bool fit(const Facts& facts, PyObject* list) {
  const size_t count = facts.of.size();
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(count)) {
    return false;
  }
  for (size_t i = 0; i < count; i++) {
    if (i + kAhead < count) {
      prefetch(facts.of[i + kAhead], PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i + kAhead)), facts.alone);
    }
    const Fact& fact = facts.of[i];
    const Kind& kind = facts.kinds[fact.kind];
    PyObject* item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    if (!(facts.alone ? lies(fact, item) : fits(fact, kind, item, facts.placed))) {
      return false;
    }
  }
  return true;
}

inline PyObject* tensors_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* list;
  int placed;
  int alone = 0;
  if (!PyArg_ParseTuple(args, "O!p|p", &PyList_Type, &list, &placed, &alone)) {
    return nullptr;
  }
  auto facts = std::make_unique<Facts>();
  facts->placed = placed;
  facts->alone = alone;
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
