// The comparisons that graphplan makes before every replay, in one call.
//
// `Checks(rows).hold()` does exactly what `_Checks` does in graphplan/compare/comparing.py, and each kind of row does
// what the function of that name in `_KINDS` does there.

#include "moves.h"
#include "tensors.h"

#include <algorithm>

namespace {

// The arguments of a row, as many as its kind has: mostly lists of one length, for some kinds a function. Rows with
// `ask_one` are compared container by container, those with `ask` as a whole.
struct Row {
  using Ask = int (*)(const Row&);
  using AskOne = int (*)(const Row&, Py_ssize_t i, Py_ssize_t start);
  Ask ask;
  AskOne ask_one;
  PyObject* parts[4];

  PyObject* list(size_t part) const { return parts[part]; }
  PyObject* at(size_t part, Py_ssize_t i) const { return PyList_GET_ITEM(parts[part], i); }
  Py_ssize_t size() const { return PyList_GET_SIZE(parts[0]); }
};

// One comparison of a container: the row, the index in the row's lists, and where the container's items begin in them.
struct Question {
  PyObject* container;
  size_t row;
  Py_ssize_t i, start;
};

// A container, the index of the first question about it, and its state when all of them were last answered with yes.
struct Watched {
  PyObject* container;
  size_t first;
  uint64_t state;
};

struct Asked {
  std::vector<Row> rows;
  std::vector<Question> questions;
  std::vector<Watched> watched;
};

struct Checks {
  PyObject_HEAD
  PyObject* held;
  Asked* asked;
};

// Each comparison returns 1 for yes, 0 for no and -1 for an error.

// Returns whether `found` is item `i` of the list. Checks the length, because a lookup may run Python that shortens it.
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

// The lookup function is a template parameter, so that the compiler inlines it into the loop.
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
    // Keep the equal object, so that the next comparison finds it by identity.
    if (PyList_SetItem(row.list(2), i, found) < 0) {
      return -1;
    }
  }
  return 1;
}

int same_value(const Row& row, Py_ssize_t i, Py_ssize_t) {
  PyObject* found = PyDict_GetItemWithError(row.at(0, i), row.at(1, i));
  if (found == nullptr && PyErr_Occurred()) {
    return -1;
  }
  return (found == nullptr ? Py_None : found) == row.at(2, i) ? 1 : 0;
}

int not_there(const Row& row, Py_ssize_t i, Py_ssize_t) {
  const int there = PyDict_Contains(row.at(0, i), row.at(1, i));
  return there < 0 ? -1 : 1 - there;
}

int same_length(const Row& row, Py_ssize_t i, Py_ssize_t) {
  const Py_ssize_t length = PyObject_Size(row.at(0, i)), known = PyLong_AsSsize_t(row.at(1, i));
  return PyErr_Occurred() ? -1 : length == known ? 1 : 0;
}

int same_types(const Row& row) {
  for (Py_ssize_t i = 0; i < row.size(); i++) {
    if (i + static_cast<Py_ssize_t>(graphplan::kAhead) < row.size()) {
      graphplan::prefetch(row.at(0, i + static_cast<Py_ssize_t>(graphplan::kAhead)));
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(row.at(0, i))) != row.at(1, i)) {
      return 0;
    }
  }
  return 1;
}

// Compares objects one after another with the items of the list `known`, from index `first` on.
class Sequence {
 public:
  explicit Sequence(PyObject* known, Py_ssize_t first = 0) : known_(known), next_(first) {}
  bool goes_on_with(PyObject* thing) { return next_ < PyList_GET_SIZE(known_) && PyList_GET_ITEM(known_, next_++) == thing; }

 private:
  PyObject* known_;
  Py_ssize_t next_;
};

int same_dict(const Row& row, Py_ssize_t i, Py_ssize_t start) {
  PyObject* dict = row.at(0, i);
  if (PyDict_GET_SIZE(dict) != PyLong_AsSsize_t(row.at(1, i))) {
    return 0;
  }
  Sequence keys(row.list(2), start), values(row.list(3), start);
  PyObject *key, *value;
  Py_ssize_t place = 0;
  while (PyDict_Next(dict, &place, &key, &value)) {
    if (!keys.goes_on_with(key) || !values.goes_on_with(value)) {
      return 0;
    }
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

// The arguments of a kind of row: `equal` lists of one length, `lists` lists in all, and `parts` arguments in all.
struct Named {
  const char* name;
  Row::Ask ask;
  Row::AskOne ask_one;
  Py_ssize_t equal;
  Py_ssize_t lists;
  Py_ssize_t parts;
};

const Named kKinds[] = {
    {"same_items", are_same<item_of>, nullptr, 3, 3, 3},
    {"equal_items", are_equal<item_of>, nullptr, 3, 3, 4},
    {"equal_attributes", are_equal<attribute_of>, nullptr, 3, 3, 4},
    {"same_attributes", are_same<attribute_of>, nullptr, 3, 3, 3},
    {"same_values", nullptr, same_value, 3, 3, 3},
    {"none_there", nullptr, not_there, 2, 2, 2},
    {"same_types", same_types, nullptr, 2, 2, 2},
    {"same_lengths", nullptr, same_length, 2, 2, 2},
    {"same_dicts", nullptr, same_dict, 2, 4, 4},
    {"same_lists", same_lists, nullptr, 2, 3, 3},
    {"same_results", same_results, nullptr, 2, 2, 2},
    {"fit", fit, nullptr, 1, 1, 2},
};

// Adds a row to `asked`. Returns false, with a Python error set, if the row is invalid.
bool take(PyObject* row, Asked& asked, PyTypeObject* tensors) {
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
    Row taken{named.ask, named.ask_one, {}};
    for (Py_ssize_t i = 0; i < named.parts; i++) {
      PyObject* part = taken.parts[i] = PyTuple_GET_ITEM(row, i + 1);
      if ((i < named.lists && !PyList_CheckExact(part)) || (i < named.equal && PyList_GET_SIZE(part) != taken.size())) {
        PyErr_Format(PyExc_TypeError, "expected lists of one length for %s", named.name);
        return false;
      }
    }
    if (named.ask == fit && Py_TYPE(taken.parts[1]) != tensors) {
      PyErr_SetString(PyExc_TypeError, "expected what was noted of the tensors");
      return false;
    }
    Py_ssize_t start = 0;
    for (Py_ssize_t i = 0; named.ask_one != nullptr && i < taken.size(); i++) {
      asked.questions.push_back({taken.at(0, i), asked.rows.size(), i, start});
      start += named.ask_one == same_dict ? PyLong_AsSsize_t(taken.at(1, i)) : 0;
    }
    asked.rows.push_back(taken);
    return true;
  }
  PyErr_Format(PyExc_TypeError, "%R is no kind of check", PyTuple_GET_ITEM(row, 0));
  return false;
}

// Groups the questions by container.
void gather(Asked& asked) {
  std::vector<Question>& questions = asked.questions;
  std::stable_sort(questions.begin(), questions.end(),
                   [](const Question& one, const Question& other) { return one.container < other.container; });
  for (size_t n = 0; n < questions.size(); n++) {
    if (n == 0 || questions[n].container != questions[n - 1].container) {
      asked.watched.push_back({questions[n].container, n, 0});
    }
  }
  asked.watched.shrink_to_fit();
}

// Returns the version tag of a dictionary, unique to its state (PEP 509); 0 from Python 3.13, and for other containers.
uint64_t state_of(PyObject* container) {
#if PY_VERSION_HEX < 0x030D0000
  return PyDict_Check(container) ? reinterpret_cast<PyDictObject*>(container)->ma_version_tag : 0;
#else
  return 0;
#endif
}

// Prefetches containers that come later, and the keys of dictionaries in Pythons without version tags.
void fetch_ahead(const std::vector<Watched>& watched, size_t n) {
  if (n + graphplan::kAhead < watched.size()) {
    graphplan::prefetch(watched[n + graphplan::kAhead].container);
  }
#if PY_VERSION_HEX >= 0x030D0000
  if (n + graphplan::kAhead / 2 < watched.size()) {
    PyObject* near = watched[n + graphplan::kAhead / 2].container;
    if (PyDict_Check(near)) {
      const auto* keys = reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(near)->ma_keys);
      graphplan::prefetch(keys);
      graphplan::prefetch(keys + 64);
    }
  }
#endif
}

// Compares the containers, except dictionaries whose version tag is the one of their last successful comparison.
int ask_containers(Asked& asked) {
  const size_t count = asked.watched.size();
  for (size_t n = 0; n < count; n++) {
    fetch_ahead(asked.watched, n);
    Watched& watched = asked.watched[n];
    const uint64_t now = state_of(watched.container);
    if (now != 0 && now == watched.state) {
      continue;
    }
    const size_t end = n + 1 < count ? asked.watched[n + 1].first : asked.questions.size();
    for (size_t place = watched.first; place < end; place++) {
      const Question& question = asked.questions[place];
      const Row& row = asked.rows[question.row];
      const int yes = row.ask_one(row, question.i, question.start);
      if (yes != 1) {
        return yes;
      }
    }
    watched.state = now;
  }
  return 1;
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
  auto asked = std::make_unique<Asked>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held); i++) {
    if (!take(PyTuple_GET_ITEM(held, i), *asked, tensors_type)) {
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
  gather(*asked);
  self->asked = asked.release();
  return reinterpret_cast<PyObject*>(self);
}

int checks_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Checks*>(self)->held);
  return 0;
}

int checks_clear(PyObject* self) {
  auto* checks = reinterpret_cast<Checks*>(self);
  delete checks->asked;
  checks->asked = nullptr;
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
  Asked* asked = reinterpret_cast<Checks*>(self)->asked;
  int yes = asked == nullptr ? 1 : ask_containers(*asked);
  for (size_t i = 0; yes == 1 && asked != nullptr && i < asked->rows.size(); i++) {
    const Row& row = asked->rows[i];
    yes = row.ask == nullptr ? 1 : row.ask(row);
  }
  Py_DECREF(self);
  return yes < 0 ? nullptr : PyBool_FromLong(yes);
  END_HANDLE_TH_ERRORS
}

// Does what `_lie` does in graphplan/compare/comparing.py.
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
