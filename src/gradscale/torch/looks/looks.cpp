// The looks of plain.py, each one pass over a list of tensors.
//
// Every function gives the answer of its twin there, or None where it cannot tell
// because a tensor is of another type than Tensor or Parameter: the twin then answers.
// The GIL is held throughout. Addresses, versions and sizes are arrays of type "q".

#include <Python.h>

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

PyObject* array_type = nullptr;
PyObject* defaultdict_type = nullptr;

// A reference that is given back at the end of the block.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  ~Owned() {
    Py_XDECREF(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const {
    return object_;
  }

 private:
  PyObject* object_;
};

using Numbers = std::vector<int64_t>;

PyObject* array_of(const Numbers& numbers) {
  Owned bytes(PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(numbers.data()),
      static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t))));
  if (bytes.get() == nullptr) {
    return nullptr;
  }
  return PyObject_CallFunction(array_type, "sO", "q", bytes.get());
}

// The numbers of an array, for as long as this lives; invalid if it is none.
class Held {
 public:
  explicit Held(PyObject* object) {
    held_ = PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) == 0;
    if (!held_) {
      PyErr_Clear();
    }
  }
  ~Held() {
    if (held_) {
      PyBuffer_Release(&view_);
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  bool valid() const {
    return held_ && view_.len % static_cast<Py_ssize_t>(sizeof(int64_t)) == 0;
  }
  Py_ssize_t size() const {
    return view_.len / static_cast<Py_ssize_t>(sizeof(int64_t));
  }
  const int64_t* data() const {
    return static_cast<const int64_t*>(view_.buf);
  }

 private:
  Py_buffer view_;
  bool held_;
};

// Tensors lie scattered, and thousands of them fit into no cache of one processor: asked
// for one by one, most of the time goes into waiting for memory. So a loop fetches each
// tensor link by link, long before it comes to it; between two links pass AWAY places,
// which is time enough for one to arrive. The loop over gradients, which backward has
// pushed out of the caches, begins AHEAD places early. Lists lie in order, and the
// processor fetches them by itself.
constexpr Py_ssize_t AWAY = 8;
constexpr Py_ssize_t AHEAD = 5 * AWAY;

template <typename Whole>
void fetch(const Whole* whole) {
  const char* begin = reinterpret_cast<const char*>(whole);
  for (size_t line = 0; line < sizeof(Whole); line += 64) {
    __builtin_prefetch(begin + line);
  }
  // It need not begin with a line.
  __builtin_prefetch(begin + sizeof(Whole) - 1);
}

// What the words of something private point to. Nothing is read there, and fetching
// what is no address does nothing.
template <typename Whole>
void fetch_behind(const Whole& whole) {
  void* words[sizeof(Whole) / sizeof(void*)];
  std::memcpy(words, static_cast<const void*>(&whole), sizeof(words));
  for (void* word : words) {
    __builtin_prefetch(word);
  }
}

// The tensor at a place of a list; null where there is none.
const c10::TensorImpl* tensor_at(PyObject* list, Py_ssize_t place) {
  if (place < 0 || place >= PyList_GET_SIZE(list)) {
    return nullptr;
  }
  PyObject* object = PyList_GET_ITEM(list, place);
  return THPVariable_CheckExact(object)
      ? THPVariable_Unpack(object).unsafeGetTensorImpl()
      : nullptr;
}

// For a loop over tensors that has come to this place: the object and what it stands
// for, but not their sizes, which lie in the middle. Returns the tensor to go on with.
const c10::TensorImpl* fetch_tensor(PyObject* list, Py_ssize_t place) {
  const Py_ssize_t furthest = place + 3 * AWAY;
  if (furthest < PyList_GET_SIZE(list)) {
    __builtin_prefetch(PyList_GET_ITEM(list, furthest));
  }
  if (const auto* tensor = tensor_at(list, place + 2 * AWAY)) {
    const char* begin = reinterpret_cast<const char*>(tensor);
    __builtin_prefetch(begin);
    __builtin_prefetch(begin + 63);
    __builtin_prefetch(begin + sizeof(*tensor) - 1);
  }
  return tensor_at(list, place + AWAY);
}

// For a loop over gradients that has come to this place, perhaps before the first.
void fetch_grads(PyObject* params, Py_ssize_t place) {
  const Py_ssize_t furthest = place + AHEAD;
  if (furthest < PyList_GET_SIZE(params)) {
    __builtin_prefetch(PyList_GET_ITEM(params, furthest));
  }
  if (const auto* param = tensor_at(params, place + 4 * AWAY)) {
    fetch(param);
  }
  if (const auto* param = tensor_at(params, place + 3 * AWAY)) {
    // The gradient is among the first words there.
    const auto* meta = reinterpret_cast<const char*>(param->autograd_meta());
    __builtin_prefetch(meta);
    __builtin_prefetch(meta + 63);
  }
  if (const auto* param = tensor_at(params, place + 2 * AWAY)) {
    fetch(param->grad().unsafeGetTensorImpl());
  }
  if (const auto* param = tensor_at(params, place + AWAY)) {
    const auto* grad = param->grad().unsafeGetTensorImpl();
    fetch_behind(*grad->pyobj_slot());
    fetch_behind(grad->version_counter());
    if (grad->has_storage()) {
      fetch(grad->unsafe_storage().unsafeGetStorageImpl());
    }
  }
}

// The gradient; warns as Python does where it is asked for in vain.
const at::Tensor& grad_of(const at::Tensor& tensor) {
  const at::Tensor& found = tensor.unsafeGetTensorImpl()->grad();
  return found.defined() ? found : tensor.grad();
}

int64_t address_of(const at::Tensor& tensor) {
  // Not the constant one: memory that is copied on write is copied now.
  return reinterpret_cast<int64_t>(tensor.data_ptr());
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference()
      ? static_cast<int64_t>(tensor._version())
      : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

bool accepted(at::ScalarType dtype, bool allow_fp16) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble ||
      (dtype == at::kHalf && allow_fp16);
}

// Whether no address is 0 and none is there twice.
bool distinct(const Numbers& addresses) {
  size_t places = 16;
  while (places < 2 * addresses.size()) {
    places *= 2;
  }
  std::vector<int64_t> taken(places, 0);
  for (const int64_t address : addresses) {
    if (address == 0) {
      return false;
    }
    // Fibonacci hashing: addresses are multiples of large powers of two.
    uint64_t hash = static_cast<uint64_t>(address) * 0x9E3779B97F4A7C15ULL;
    size_t place = (hash >> 32) & (places - 1);
    while (taken[place] != 0) {
      if (taken[place] == address) {
        return false;
      }
      place = (place + 1) & (places - 1);
    }
    taken[place] = address;
  }
  return true;
}

// Whether these addresses of this device and dtype were known to be apart.
bool same_as_before(
    const Numbers& addresses,
    const at::Tensor& first,
    PyObject* kind,
    PyObject* before) {
  if (!PyTuple_Check(kind) || PyTuple_GET_SIZE(kind) != 2 || before == Py_None) {
    return false;
  }
  PyObject* device = PyTuple_GET_ITEM(kind, 0);
  PyObject* dtype = PyTuple_GET_ITEM(kind, 1);
  if (!THPDevice_Check(device) || !THPDtype_Check(dtype) ||
      reinterpret_cast<THPDevice*>(device)->device != first.device() ||
      reinterpret_cast<THPDtype*>(dtype)->scalar_type != first.scalar_type()) {
    return false;
  }
  Held old(before);
  return old.valid() && old.size() == static_cast<Py_ssize_t>(addresses.size()) &&
      std::memcmp(old.data(), addresses.data(), addresses.size() * sizeof(int64_t)) ==
      0;
}

PyObject* gather(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* params = nullptr;
  PyObject* kind = nullptr;
  PyObject* before = nullptr;
  int allow_fp16 = 0;
  if (!PyArg_ParseTuple(args, "OpOO", &params, &allow_fp16, &kind, &before)) {
    return nullptr;
  }
  if (!PyList_Check(params)) {
    Py_RETURN_NONE;
  }
  // Those with a gradient, once one without is met.
  Owned chosen(PyList_New(0));
  Owned tensors(PyList_New(0));
  if (chosen.get() == nullptr || tensors.get() == nullptr) {
    return nullptr;
  }
  bool all = true;
  Numbers addresses, versions, numels;
  const auto count = static_cast<size_t>(PyList_GET_SIZE(params));
  addresses.reserve(count);
  versions.reserve(count);
  numels.reserve(count);
  at::Tensor first, untracked;
  bool contiguous = true, views = false, one_device = true;
  // Making the object of a gradient may run the garbage collector, and that anything:
  // the length is asked for again in each turn, and what is looked at is held.
  for (Py_ssize_t i = -AHEAD; i < PyList_GET_SIZE(params); i++) {
    fetch_grads(params, i);
    if (i < 0) {
      continue;
    }
    PyObject* param = PyList_GET_ITEM(params, i);
    if (!THPVariable_CheckExact(param)) {
      Py_RETURN_NONE;
    }
    Owned held(Py_NewRef(param));
    const at::Tensor& there = grad_of(THPVariable_Unpack(param));
    if (!there.defined()) {
      if (all) {
        Owned until(PyList_GetSlice(params, 0, i));
        if (until.get() == nullptr ||
            PyList_SetSlice(chosen.get(), 0, 0, until.get()) != 0) {
          return nullptr;
        }
        all = false;
      }
      continue;
    }
    Owned object(THPVariable_Wrap(there));
    if (object.get() == nullptr) {
      return nullptr;
    }
    const at::Tensor& grad = THPVariable_Unpack(object.get());
    if (reinterpret_cast<PyObject*>(Py_TYPE(object.get())) != THPVariableClass ||
        grad.layout() != at::kStrided) {
      Py_RETURN_NONE;
    }
    if (!first.defined()) {
      first = grad;
      if (!accepted(grad.scalar_type(), allow_fp16 != 0)) {
        Py_RETURN_NONE;
      }
    }
    if (grad.scalar_type() != first.scalar_type()) {
      Py_RETURN_NONE;
    }
    try {
      addresses.push_back(address_of(grad));
      contiguous &= grad.is_contiguous();
      numels.push_back(grad.numel());
    } catch (const c10::Error&) {
      Py_RETURN_NONE;
    }
    one_device &= grad.get_device() == first.get_device();
    views |= grad.is_view();
    if (grad.is_inference()) {
      untracked = grad;
      versions.push_back(0);
    } else {
      versions.push_back(version_of(grad));
    }
    if (PyList_Append(tensors.get(), object.get()) != 0 ||
        (!all && PyList_Append(chosen.get(), param) != 0)) {
      return nullptr;
    }
  }
  if (!first.defined() || !contiguous) {
    Py_RETURN_NONE;
  }
  if (!same_as_before(addresses, first, kind, before) &&
      (!one_device || views || !distinct(addresses))) {
    Py_RETURN_NONE;
  }
  if (untracked.defined()) {
    // Raises, as it does in Python.
    untracked._version();
  }
  Owned begins(array_of(addresses));
  Owned marks(array_of(versions));
  Owned sizes(array_of(numels));
  if (begins.get() == nullptr || marks.get() == nullptr || sizes.get() == nullptr) {
    return nullptr;
  }
  return PyTuple_Pack(
      5,
      all ? params : chosen.get(),
      tensors.get(),
      begins.get(),
      marks.get(),
      sizes.get());
  END_HANDLE_TH_ERRORS
}

PyObject* untouched(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* params = nullptr;
  PyObject* tensors = nullptr;
  PyObject* versions = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &params, &tensors, &versions)) {
    return nullptr;
  }
  if (!PyList_Check(params) || !PyList_Check(tensors)) {
    Py_RETURN_NONE;
  }
  const Held marks(versions);
  const Py_ssize_t count = PyList_GET_SIZE(params);
  const Py_ssize_t expected = PyList_GET_SIZE(tensors);
  if (!marks.valid() || marks.size() != expected) {
    Py_RETURN_NONE;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!THPVariable_CheckExact(PyList_GET_ITEM(params, i))) {
      Py_RETURN_NONE;
    }
  }
  Py_ssize_t place = 0;
  bool same = true;
  for (Py_ssize_t i = 0; i < count && same; i++) {
    if (const auto* next = fetch_tensor(params, i)) {
      // The gradient is among the first words there.
      __builtin_prefetch(next->autograd_meta());
    }
    if (const auto* next = fetch_tensor(tensors, i)) {
      fetch_behind(next->version_counter());
    }
    const at::Tensor& grad = grad_of(THPVariable_Unpack(PyList_GET_ITEM(params, i)));
    if (!grad.defined()) {
      same = count != expected;
      continue;
    }
    if (place == expected) {
      same = false;
      break;
    }
    PyObject* object = PyList_GET_ITEM(tensors, place);
    if (!THPVariable_CheckExact(object)) {
      Py_RETURN_NONE;
    }
    // A tensor that an object is held of has no other object.
    const at::Tensor& tensor = THPVariable_Unpack(object);
    same = tensor.is_same(grad) &&
        version_of(tensor) == marks.data()[place];
    place++;
  }
  return PyBool_FromLong(same && place == expected);
  END_HANDLE_TH_ERRORS
}

// A number of each tensor of a list.
template <typename Look>
PyObject* of_each(PyObject* tensors, Look look) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(tensors)) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  Numbers found(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_CheckExact(object)) {
      Py_RETURN_NONE;
    }
    found[i] = look(THPVariable_Unpack(object));
  }
  return array_of(found);
  END_HANDLE_TH_ERRORS
}

PyObject* addresses(PyObject*, PyObject* tensors) {
  return of_each(tensors, address_of);
}

PyObject* begin_at(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* tensors = nullptr;
  PyObject* begins = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &tensors, &begins)) {
    return nullptr;
  }
  const Held expected(begins);
  if (!PyList_Check(tensors) || !expected.valid()) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  bool same = count == expected.size();
  for (Py_ssize_t i = 0; i < count && same; i++) {
    if (const auto* next = fetch_tensor(tensors, i)) {
      if (next->has_storage()) {
        fetch(next->unsafe_storage().unsafeGetStorageImpl());
      }
    }
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_CheckExact(object)) {
      Py_RETURN_NONE;
    }
    same = address_of(THPVariable_Unpack(object)) == expected.data()[i];
  }
  return PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

PyObject* versions(PyObject*, PyObject* tensors) {
  return of_each(tensors, version_of);
}

PyObject* note_writes(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(tensors)) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!THPVariable_CheckExact(PyList_GET_ITEM(tensors, i))) {
      Py_RETURN_NONE;
    }
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (const auto* next = fetch_tensor(tensors, i)) {
      fetch_behind(next->version_counter());
    }
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* same(PyObject*, PyObject* args) {
  PyObject* some = nullptr;
  PyObject* others = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &some, &others)) {
    return nullptr;
  }
  if (!PyList_Check(some) || !PyList_Check(others)) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t count = PyList_GET_SIZE(some);
  if (count != PyList_GET_SIZE(others)) {
    Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (PyList_GET_ITEM(some, i) != PyList_GET_ITEM(others, i)) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

PyObject* same_state(PyObject*, PyObject* args) {
  PyObject* state = nullptr;
  PyObject* owners = nullptr;
  PyObject* values = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &state, &owners, &values)) {
    return nullptr;
  }
  // Another class may hand out something else than lies in it.
  const bool plain = PyDict_CheckExact(state) ||
      reinterpret_cast<PyObject*>(Py_TYPE(state)) == defaultdict_type;
  if (!plain || !PyList_Check(owners) || !PyList_Check(values)) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t owner_count = PyList_GET_SIZE(owners);
  const Py_ssize_t value_count = PyList_GET_SIZE(values);
  if (PyDict_GET_SIZE(state) != owner_count) {
    Py_RETURN_FALSE;
  }
  Py_ssize_t at = 0, owner = 0, value = 0;
  PyObject *key = nullptr, *entries = nullptr;
  bool fits = true;
  while (PyDict_Next(state, &at, &key, &entries)) {
    if (!PyDict_Check(entries)) {
      Py_RETURN_NONE;
    }
    if (!fits) {
      continue;
    }
    fits = key == PyList_GET_ITEM(owners, owner++);
    Py_ssize_t inner = 0;
    PyObject *name = nullptr, *entry = nullptr;
    while (fits && PyDict_Next(entries, &inner, &name, &entry)) {
      fits = value < value_count && entry == PyList_GET_ITEM(values, value);
      value++;
    }
  }
  return PyBool_FromLong(fits && value == value_count);
}

PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, nullptr},
    {"untouched", untouched, METH_VARARGS, nullptr},
    {"addresses", addresses, METH_O, nullptr},
    {"begin_at", begin_at, METH_VARARGS, nullptr},
    {"versions", versions, METH_O, nullptr},
    {"note_writes", note_writes, METH_O, nullptr},
    {"same", same, METH_VARARGS, nullptr},
    {"same_state", same_state, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "gradscale_looks", nullptr, -1, methods};

PyObject* attribute_of(const char* module, const char* name) {
  Owned found(PyImport_ImportModule(module));
  return found.get() == nullptr ? nullptr : PyObject_GetAttrString(found.get(), name);
}

} // namespace

PyMODINIT_FUNC PyInit_gradscale_looks() {
  array_type = attribute_of("array", "array");
  defaultdict_type = attribute_of("collections", "defaultdict");
  if (array_type == nullptr || defaultdict_type == nullptr) {
    return nullptr;
  }
  return PyModule_Create(&definition);
}
