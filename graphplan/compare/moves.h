// Copies tensors into and out of a replay, without calling each operator from Python.
//
// The functions do what those of graphplan/compare/moving.py do. Autograd records neither them nor views among results.

#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/core/LegacyTypeDispatch.h>

#include <vector>

namespace graphplan {

inline bool are_tensors(PyObject* list) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    if (!THPVariable_Check(PyList_GET_ITEM(list, i))) {
      return false;
    }
  }
  return true;
}

inline PyObject* copy_in(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *targets, *sources;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &targets, &PyList_Type, &sources)) {
    return nullptr;
  }
  const Py_ssize_t count = PyList_GET_SIZE(targets);
  if (PyList_GET_SIZE(sources) != count || !are_tensors(targets) || !are_tensors(sources)) {
    PyErr_SetString(PyExc_TypeError, "expected two lists of as many tensors");
    return nullptr;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (Py_ssize_t i = 0; i < count; i++) {
    pairs.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(targets, i)), THPVariable_Unpack(PyList_GET_ITEM(sources, i)));
  }
  {
    pybind11::gil_scoped_release released;
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [target, source] : pairs) {
      target.copy_(source, /*non_blocking=*/true);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* hand_out(PyObject*, PyObject* vector) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(vector)) {
    PyErr_SetString(PyExc_TypeError, "expected a tensor");
    return nullptr;
  }
  std::vector<at::Tensor> parts;
  const at::Tensor whole = THPVariable_Unpack(vector);
  {
    pybind11::gil_scoped_release released;
    at::AutoDispatchBelowADInplaceOrView below;
    parts = whole.clone().unbind();
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(parts.size()));
  for (size_t i = 0; list != nullptr && i < parts.size(); i++) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), THPVariable_Wrap(parts[i]));
  }
  return list;
  END_HANDLE_TH_ERRORS
}

inline PyObject* fill(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* tensor;
  double number;
  if (!PyArg_ParseTuple(args, "Od", &tensor, &number)) {
    return nullptr;
  }
  if (!THPVariable_Check(tensor)) {
    PyErr_SetString(PyExc_TypeError, "expected a tensor");
    return nullptr;
  }
  at::Tensor filled = THPVariable_Unpack(tensor);
  {
    pybind11::gil_scoped_release released;
    at::AutoDispatchBelowADInplaceOrView below;
    filled.fill_(number);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace graphplan
