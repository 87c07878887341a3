// What graphplan compares before every replay, without Python between two comparisons.
//
// Each function is exactly the Python expression of the same name in graphplan/native/comparing.py.

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace {

// ---------------------------------------------------------------- tensors

struct Fact {
  PyTypeObject* type;
  uint64_t keys;
  const void* memory;
  int64_t offset;
  int64_t ndim;
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
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
bool is_dense(const at::Tensor& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided && tensor.has_storage() &&
      !tensor.is_nested();
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->data();
}

void add(Facts& facts, PyObject* item, const at::Tensor& tensor) {
  // Kept, so that no other class can come to lie where it does.
  Py_INCREF(Py_TYPE(item));
  facts.of.push_back({Py_TYPE(item), tensor.key_set().raw_repr(), memory_of(tensor), tensor.storage_offset(),
                      tensor.dim(), tensor.scalar_type(), tensor.device(), tensor.requires_grad()});
  for (int64_t size : tensor.sizes()) {
    facts.dims.push_back(size);
  }
  for (int64_t stride : tensor.strides()) {
    facts.dims.push_back(stride);
  }
}

// Whether `item` is as `fact` says. The same dispatch keys mean the same layout, and memory of its own.
bool fits(const Fact& fact, const int64_t* dims, PyObject* item, bool placed) {
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
  const auto ndim = static_cast<size_t>(fact.ndim);
  return tensor.sizes() == c10::IntArrayRef(dims, ndim) && tensor.strides() == c10::IntArrayRef(dims + ndim, ndim) &&
      tensor.scalar_type() == fact.dtype && tensor.device() == fact.device &&
      tensor.requires_grad() == fact.requires_grad;
}

PyObject* tensors_new(PyTypeObject* type, PyObject* args, PyObject*) {
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

void tensors_dealloc(PyObject* self) {
  delete reinterpret_cast<Tensors*>(self)->facts;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* tensors_fit(PyObject* self, PyObject* list) {
  HANDLE_TH_ERRORS
  const Facts& facts = *reinterpret_cast<Tensors*>(self)->facts;
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(facts.of.size())) {
    Py_RETURN_FALSE;
  }
  const int64_t* dims = facts.dims.data();
  for (size_t i = 0; i < facts.of.size(); i++) {
    const Fact& fact = facts.of[i];
    if (!fits(fact, dims, PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)), facts.placed)) {
      Py_RETURN_FALSE;
    }
    dims += 2 * fact.ndim;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef tensors_methods[] = {{"fit", tensors_fit, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot tensors_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tensors_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tensors_dealloc)},
    {Py_tp_methods, tensors_methods},
    {0, nullptr}};
PyType_Spec tensors_spec = {"graphplan_guards.Tensors", sizeof(Tensors), 0, Py_TPFLAGS_DEFAULT, tensors_slots};

// ---------------------------------------------------------------- containers

// Several lists of one length, as arguments.
template <size_t N>
bool take(PyObject* const* args, Py_ssize_t count, PyObject* (&lists)[N]) {
  if (count != static_cast<Py_ssize_t>(N)) {
    PyErr_Format(PyExc_TypeError, "expected %zu lists", N);
    return false;
  }
  for (size_t i = 0; i < N; i++) {
    if (!PyList_CheckExact(args[i]) || PyList_GET_SIZE(args[i]) != PyList_GET_SIZE(args[0])) {
      PyErr_SetString(PyExc_TypeError, "expected lists of one length");
      return false;
    }
    lists[i] = args[i];
  }
  return true;
}

// Runs `check(i)`, which says 1 for yes, 0 for no and -1 for an error, until one is not yes.
template <typename Check>
PyObject* all_of(PyObject* list, Check check) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    int yes = check(i);
    if (yes < 0) {
      return nullptr;
    }
    if (yes == 0) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

PyObject* same_items(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* lists[3];
  if (!take(args, count, lists)) {
    return nullptr;
  }
  return all_of(lists[0], [&](Py_ssize_t i) -> int {
    PyObject* container = PyList_GET_ITEM(lists[0], i);
    // Whoever is asked may run Python that changes the lists.
    Py_INCREF(container);
    PyObject* found = PyObject_GetItem(container, PyList_GET_ITEM(lists[1], i));
    Py_DECREF(container);
    if (found == nullptr) {
      return -1;
    }
    int same = i < PyList_GET_SIZE(lists[2]) && found == PyList_GET_ITEM(lists[2], i);
    Py_DECREF(found);
    return same;
  });
}

PyObject* same_attributes(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* lists[3];
  if (!take(args, count, lists)) {
    return nullptr;
  }
  return all_of(lists[0], [&](Py_ssize_t i) -> int {
    PyObject* found = PyObject_GetAttr(PyList_GET_ITEM(lists[0], i), PyList_GET_ITEM(lists[1], i));
    if (found == nullptr) {
      return -1;
    }
    int same = i < PyList_GET_SIZE(lists[2]) && found == PyList_GET_ITEM(lists[2], i);
    Py_DECREF(found);
    return same;
  });
}

PyObject* same_values(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* lists[3];
  if (!take(args, count, lists)) {
    return nullptr;
  }
  return all_of(lists[0], [&](Py_ssize_t i) -> int {
    PyObject* found = PyDict_GetItemWithError(PyList_GET_ITEM(lists[0], i), PyList_GET_ITEM(lists[1], i));
    if (found == nullptr && PyErr_Occurred()) {
      return -1;
    }
    return (found == nullptr ? Py_None : found) == PyList_GET_ITEM(lists[2], i);
  });
}

PyObject* none_there(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* lists[2];
  if (!take(args, count, lists)) {
    return nullptr;
  }
  return all_of(lists[0], [&](Py_ssize_t i) -> int {
    int there = PyDict_Contains(PyList_GET_ITEM(lists[0], i), PyList_GET_ITEM(lists[1], i));
    return there < 0 ? -1 : !there;
  });
}

PyObject* same_types(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* lists[2];
  if (!take(args, count, lists)) {
    return nullptr;
  }
  return all_of(lists[0], [&](Py_ssize_t i) -> int {
    return reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(lists[0], i))) == PyList_GET_ITEM(lists[1], i);
  });
}

PyObject* same_lengths(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* lists[2];
  if (!take(args, count, lists)) {
    return nullptr;
  }
  return all_of(lists[0], [&](Py_ssize_t i) -> int {
    Py_ssize_t length = PyObject_Size(PyList_GET_ITEM(lists[0], i));
    Py_ssize_t known = PyLong_AsSsize_t(PyList_GET_ITEM(lists[1], i));
    return PyErr_Occurred() ? -1 : length == known;
  });
}

PyMethodDef functions[] = {
    {"same_items", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(same_items)), METH_FASTCALL, nullptr},
    {"same_attributes", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(same_attributes)), METH_FASTCALL,
     nullptr},
    {"same_values", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(same_values)), METH_FASTCALL, nullptr},
    {"none_there", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(none_there)), METH_FASTCALL, nullptr},
    {"same_types", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(same_types)), METH_FASTCALL, nullptr},
    {"same_lengths", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(same_lengths)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "graphplan_guards", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_graphplan_guards() {
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module == nullptr ? nullptr : PyType_FromSpec(&tensors_spec);
  if (type == nullptr || PyModule_AddObject(module, "Tensors", type) < 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
