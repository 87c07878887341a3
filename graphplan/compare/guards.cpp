// What graphplan compares before every replay, in one call.
//
// `Checks(rows).hold()` is exactly the class of that name in graphplan/compare/comparing.py, and each kind of row the
// function of that name there.

#include "moves.h"
#include "tensors.h"

#include <algorithm>
#include <utility>

namespace {

using graphplan::kAhead;

// What a row is made of, as many as its kind has: lists of one length, and for some a function.
struct Row {
  using Kind = int (*)(const Row&);
  Kind kind;
  PyObject* parts[4];
  // The state in which each dictionary was found to hold what it is to hold, and where that ends in the lists.
  mutable std::vector<std::pair<uint64_t, Py_ssize_t>> seen;

  PyObject* list(size_t part) const { return parts[part]; }
  PyObject* at(size_t part, Py_ssize_t i) const { return PyList_GET_ITEM(parts[part], i); }
  Py_ssize_t size() const { return PyList_GET_SIZE(parts[0]); }
};

struct Checks {
  PyObject_HEAD
  PyObject* held;
  std::vector<Row>* rows;
};

// The things in `list` that come later, and what lies behind dictionaries, are fetched meanwhile.
void fetch_ahead(PyObject* list, Py_ssize_t i) {
  const auto ahead = static_cast<Py_ssize_t>(kAhead);
  if (i + ahead < PyList_GET_SIZE(list)) {
    graphplan::prefetch(PyList_GET_ITEM(list, i + ahead));
  }
  if (i + ahead / 2 < PyList_GET_SIZE(list)) {
    PyObject* near = PyList_GET_ITEM(list, i + ahead / 2);
    if (PyDict_Check(near)) {
      const auto* keys = reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(near)->ma_keys);
      graphplan::prefetch(keys);
      graphplan::prefetch(keys + 64);
    }
  }
}

// Each kind says 1 for yes, 0 for no and -1 for an error.

// Whether what was found is what lies in the list. Whoever was asked may have run Python, which may have changed lists.
int is_same(PyObject* found, PyObject* list, Py_ssize_t i) {
  if (found == nullptr) {
    return -1;
  }
  int same = i < PyList_GET_SIZE(list) && found == PyList_GET_ITEM(list, i);
  Py_DECREF(found);
  return same;
}

PyObject* item_of(const Row& row, Py_ssize_t i) {
  PyObject* container = row.at(0, i);
  if (PyDict_CheckExact(container)) {
    PyObject* found = PyDict_GetItemWithError(container, row.at(1, i));
    if (found == nullptr && !PyErr_Occurred()) {
      PyErr_SetObject(PyExc_KeyError, row.at(1, i));
    }
    Py_XINCREF(found);
    return found;
  }
  Py_INCREF(container);
  PyObject* found = PyObject_GetItem(container, row.at(1, i));
  Py_DECREF(container);
  return found;
}

PyObject* attribute_of(const Row& row, Py_ssize_t i) { return PyObject_GetAttr(row.at(0, i), row.at(1, i)); }

// The functions that look up what is compared are parts of the types, so that they are compiled into the loops.
template <PyObject* (*look_up)(const Row&, Py_ssize_t)>
int are_same(const Row& row) {
  int yes = 1;
  for (Py_ssize_t i = 0; yes == 1 && i < row.size(); i++) {
    yes = is_same(look_up(row, i), row.list(2), i);
  }
  return yes;
}

template <PyObject* (*look_up)(const Row&, Py_ssize_t)>
int are_equal(const Row& row) {
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    PyObject* found = look_up(row, i);
    if (found == nullptr) {
      return -1;
    }
    if (i < PyList_GET_SIZE(row.list(2)) && found == row.at(2, i)) {
      Py_DECREF(found);
      continue;
    }
    PyObject* answer = PyObject_CallFunction(row.parts[3], "OO", found, row.at(2, i));
    int yes = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (yes != 1) {
      Py_DECREF(found);
      return yes;
    }
    // From now on it is this object.
    if (PyList_SetItem(row.list(2), i, found) < 0) {
      return -1;
    }
  }
  return 1;
}

// A number that no dictionary in any other state has (PEP 509); 0 in newer Pythons, which have none.
uint64_t state_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

// Asks only those dictionaries that are in another state than when they were asked last.
template <typename Ask>
int ask_changed(const Row& row, Ask ask) {
  row.seen.resize(static_cast<size_t>(row.size()));
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    fetch_ahead(row.list(0), i);
    uint64_t& state = row.seen[static_cast<size_t>(i)].first;
    const uint64_t now = state_of(row.at(0, i));
    if (now == 0 || now != state) {
      const int yes = ask(i);
      if (yes != 1) {
        return yes;
      }
      state = now;
    }
  }
  return 1;
}

int same_values(const Row& row) {
  return ask_changed(row, [&row](Py_ssize_t i) {
    PyObject* found = PyDict_GetItemWithError(row.at(0, i), row.at(1, i));
    if (found == nullptr && PyErr_Occurred()) {
      return -1;
    }
    return (found == nullptr ? Py_None : found) == row.at(2, i) ? 1 : 0;
  });
}

int none_there(const Row& row) {
  return ask_changed(row, [&row](Py_ssize_t i) {
    const int there = PyDict_Contains(row.at(0, i), row.at(1, i));
    return there < 0 ? -1 : 1 - there;
  });
}

int same_types(const Row& row) {
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    fetch_ahead(row.list(0), i);
    if (reinterpret_cast<PyObject*>(Py_TYPE(row.at(0, i))) != row.at(1, i)) {
      return 0;
    }
  }
  return 1;
}

int all_empty(const Row& row) {
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    fetch_ahead(row.list(0), i);
    PyObject* container = row.at(0, i);
    const bool is_plain = PyDict_CheckExact(container) || PyODict_CheckExact(container);
    Py_ssize_t length = is_plain ? PyDict_GET_SIZE(container) : PyObject_Size(container);
    if (length != 0) {
      return length < 0 ? -1 : 0;
    }
  }
  return 1;
}

int same_lengths(const Row& row) {
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    fetch_ahead(row.list(0), i);
    PyObject* container = row.at(0, i);
    Py_ssize_t length = PyDict_CheckExact(container) ? PyDict_GET_SIZE(container) : PyObject_Size(container);
    Py_ssize_t known = PyLong_AsSsize_t(row.at(1, i));
    if (length != known) {
      return PyErr_Occurred() ? -1 : 0;
    }
  }
  return 1;
}

// Whether the things that come one after another in `known` are those that are asked about in turn.
class Sequence {
 public:
  explicit Sequence(PyObject* known, Py_ssize_t first = 0) : known_(known), next_(first) {}
  bool goes_on_with(PyObject* thing) { return next_ < PyList_GET_SIZE(known_) && PyList_GET_ITEM(known_, next_++) == thing; }

 private:
  PyObject* known_;
  Py_ssize_t next_;
};

int same_dicts(const Row& row) {
  row.seen.resize(static_cast<size_t>(row.size()));
  Py_ssize_t next = 0;
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    fetch_ahead(row.list(0), i);
    auto& [state, end] = row.seen[static_cast<size_t>(i)];
    const uint64_t now = state_of(row.at(0, i));
    if (now != 0 && now == state) {
      next = end;
      continue;
    }
    if (PyDict_GET_SIZE(row.at(0, i)) != PyLong_AsSsize_t(row.at(1, i))) {
      return 0;
    }
    Sequence keys(row.list(2), next), values(row.list(3), next);
    PyObject *key, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(row.at(0, i), &place, &key, &value)) {
      if (!keys.goes_on_with(key) || !values.goes_on_with(value)) {
        return 0;
      }
    }
    next += PyDict_GET_SIZE(row.at(0, i));
    state = now;
    end = next;
  }
  return 1;
}

int same_lists(const Row& row) {
  Sequence items(row.list(2));
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    PyObject* list = row.at(0, i);
    if (PyList_GET_SIZE(list) != PyLong_AsSsize_t(row.at(1, i))) {
      return 0;
    }
    for (Py_ssize_t item = 0; item < PyList_GET_SIZE(list); item++) {
      if (!items.goes_on_with(PyList_GET_ITEM(list, item))) {
        return 0;
      }
    }
  }
  return 1;
}

int same_results(const Row& row) {
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    PyObject* found = PyObject_CallNoArgs(row.at(0, i));
    int yes = found == nullptr ? -1 : PyObject_RichCompareBool(found, row.at(1, i), Py_EQ);
    Py_XDECREF(found);
    if (yes != 1) {
      return yes;
    }
  }
  return 1;
}

int fit(const Row& row) {
  return graphplan::fit(*reinterpret_cast<graphplan::Tensors*>(row.parts[1])->facts, row.list(0));
}

// What a row of some kind has: lists as long as the first one, other lists, and one thing more that is no list.
struct Named {
  const char* name;
  Row::Kind kind;
  Py_ssize_t equal;
  Py_ssize_t lists;
  Py_ssize_t parts;
};

const Named kKinds[] = {
    {"same_items", are_same<item_of>, 3, 3, 3},
    {"equal_items", are_equal<item_of>, 3, 3, 4},
    {"equal_attributes", are_equal<attribute_of>, 3, 3, 4},
    {"same_attributes", are_same<attribute_of>, 3, 3, 3},
    {"same_values", same_values, 3, 3, 3},
    {"none_there", none_there, 2, 2, 2},
    {"same_types", same_types, 2, 2, 2},
    {"same_lengths", same_lengths, 2, 2, 2},
    {"all_empty", all_empty, 1, 1, 1},
    {"same_dicts", same_dicts, 2, 4, 4},
    {"same_lists", same_lists, 2, 3, 3},
    {"same_results", same_results, 2, 2, 2},
    {"fit", fit, 1, 1, 2},
};

// Takes a row apart; false, with an error set, if it is none.
bool take(PyObject* row, std::vector<Row>& rows, PyTypeObject* tensors) {
  if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) == 0 || !PyUnicode_Check(PyTuple_GET_ITEM(row, 0))) {
    PyErr_SetString(PyExc_TypeError, "expected tuples that begin with a name");
    return false;
  }
  for (const Named& named : kKinds) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(row, 0), named.name) != 0) {
      continue;
    }
    if (PyTuple_GET_SIZE(row) != named.parts + 1) {
      PyErr_Format(PyExc_TypeError, "expected %zd things for %s", named.parts, named.name);
      return false;
    }
    Row taken{named.kind, {}};
    for (Py_ssize_t i = 0; i < named.parts; i++) {
      PyObject* part = taken.parts[i] = PyTuple_GET_ITEM(row, i + 1);
      if ((i < named.lists && !PyList_CheckExact(part)) || (i < named.equal && PyList_GET_SIZE(part) != taken.size())) {
        PyErr_Format(PyExc_TypeError, "expected lists of one length for %s", named.name);
        return false;
      }
    }
    if (named.kind == fit && Py_TYPE(taken.parts[1]) != tensors) {
      PyErr_SetString(PyExc_TypeError, "expected what was noted of the tensors");
      return false;
    }
    rows.push_back(taken);
    return true;
  }
  PyErr_Format(PyExc_TypeError, "%R is no kind of check", PyTuple_GET_ITEM(row, 0));
  return false;
}

PyTypeObject* tensors_type = nullptr;

PyObject* checks_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* given;
  if (!PyArg_ParseTuple(args, "O", &given)) {
    return nullptr;
  }
  PyObject* held = PySequence_Tuple(given);
  if (held == nullptr) {
    return nullptr;
  }
  auto rows = std::make_unique<std::vector<Row>>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held); i++) {
    if (!take(PyTuple_GET_ITEM(held, i), *rows, tensors_type)) {
      Py_DECREF(held);
      return nullptr;
    }
  }
  auto* self = reinterpret_cast<Checks*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    Py_DECREF(held);
    return nullptr;
  }
  self->held = held;
  self->rows = rows.release();
  return reinterpret_cast<PyObject*>(self);
}

int checks_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Checks*>(self)->held);
  return 0;
}

int checks_clear(PyObject* self) {
  auto* checks = reinterpret_cast<Checks*>(self);
  delete checks->rows;
  checks->rows = nullptr;
  Py_CLEAR(checks->held);
  return 0;
}

void checks_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  checks_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* checks_hold(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  Py_INCREF(self);
  int yes = 1;
  const std::vector<Row>* rows = reinterpret_cast<Checks*>(self)->rows;
  for (size_t i = 0; yes == 1 && rows != nullptr && i < rows->size(); i++) {
    yes = (*rows)[i].kind((*rows)[i]);
  }
  Py_DECREF(self);
  return yes < 0 ? nullptr : PyBool_FromLong(yes);
  END_HANDLE_TH_ERRORS
}

// `lie` of graphplan/compare/comparing.py.
PyObject* lie(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *tensors, *units, *rests, *written;
  if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyList_Type, &tensors, &PyList_Type, &units, &PyList_Type, &rests,
                        &PySet_Type, &written)) {
    return nullptr;
  }
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PyList_GET_SIZE(units) != count || PyList_GET_SIZE(rests) != count) {
    PyErr_SetString(PyExc_TypeError, "expected lists of one length");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* item = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(item) || !graphplan::is_dense(THPVariable_Unpack(item))) {
      PyErr_SetString(PyExc_TypeError, "only dense tensors are compared here");
      return nullptr;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    const Py_ssize_t unit = PyLong_AsSsize_t(PyList_GET_ITEM(units, i));
    const Py_ssize_t rest = PyLong_AsSsize_t(PyList_GET_ITEM(rests, i));
    if (PyErr_Occurred()) {
      return nullptr;
    }
    if (static_cast<Py_ssize_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % static_cast<uintptr_t>(unit)) != rest) {
      Py_RETURN_FALSE;
    }
    PyObject* storage = PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl());
    const int there = storage == nullptr ? -1 : PySet_Contains(written, storage);
    Py_XDECREF(storage);
    if (there != 0) {
      return there < 0 ? nullptr : PyBool_FromLong(0);
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"lie", lie, METH_VARARGS, nullptr},
    {"copy_in", graphplan::copy_in, METH_VARARGS, nullptr},
    {"hand_out", graphplan::hand_out, METH_O, nullptr},
    {"fill", graphplan::fill, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef checks_methods[] = {{"hold", checks_hold, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot checks_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(checks_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(checks_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(checks_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(checks_clear)},
    {Py_tp_methods, checks_methods},
    {0, nullptr}};
PyType_Spec checks_spec = {"graphplan_guards.Checks", sizeof(Checks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           checks_slots};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "graphplan_guards", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_graphplan_guards() {
  PyObject* module = PyModule_Create(&definition);
  PyObject* tensors = module == nullptr ? nullptr : PyType_FromSpec(&graphplan::tensors_spec);
  PyObject* checks = tensors == nullptr ? nullptr : PyType_FromSpec(&checks_spec);
  tensors_type = reinterpret_cast<PyTypeObject*>(tensors);
  if (checks == nullptr || PyModule_AddObjectRef(module, "Tensors", tensors) < 0 ||
      PyModule_AddObjectRef(module, "Checks", checks) < 0) {
    Py_XDECREF(tensors);
    Py_XDECREF(checks);
    Py_XDECREF(module);
    return nullptr;
  }
  Py_DECREF(checks);
  return module;
}
