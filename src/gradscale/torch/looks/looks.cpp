// The looks of plain.py, each one pass over a list of tensors.
//
// Every function gives the answer of its twin there, or None where it cannot tell
// because a tensor is of another type than Tensor or Parameter: the twin then answers.
// The GIL is held throughout. Addresses, versions and sizes are arrays of type "q".
// Gradients are returned as `Tensors`, a sequence that makes an object for one when it
// is asked for: autograd makes none, and thousands would also be garbage to collect.
//
// What is shared with other threads reads and writes memory, and nothing else: no object
// is made, no reference counted, no warning given.

#include <Python.h>

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <c10/core/impl/COWDeleter.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crew.h"

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

// Tensors, held; each gets its object when it is asked for.
struct Tensors {
  PyObject_HEAD
  std::vector<at::Tensor>* held;
};

PyTypeObject* tensors_type = nullptr;

const std::vector<at::Tensor>& held_by(PyObject* self) {
  return *reinterpret_cast<Tensors*>(self)->held;
}

PyObject* tensors_of(std::vector<at::Tensor> held) {
  auto* made = PyObject_New(Tensors, tensors_type);
  if (made != nullptr) {
    made->held = new std::vector<at::Tensor>(std::move(held));
  }
  return reinterpret_cast<PyObject*>(made);
}

void drop_tensors(PyObject* self) {
  delete reinterpret_cast<Tensors*>(self)->held;
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

Py_ssize_t count_tensors(PyObject* self) {
  return static_cast<Py_ssize_t>(held_by(self).size());
}

PyObject* tensor_of(PyObject* self, Py_ssize_t place) {
  HANDLE_TH_ERRORS
  if (place < 0 || place >= count_tensors(self)) {
    PyErr_SetString(PyExc_IndexError, "there is no tensor at this place");
    return nullptr;
  }
  return THPVariable_Wrap(held_by(self)[static_cast<size_t>(place)]);
  END_HANDLE_TH_ERRORS
}

PyObject* some_tensors(PyObject* self, PyObject* key) {
  HANDLE_TH_ERRORS
  if (!PySlice_Check(key)) {
    const Py_ssize_t place = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (place == -1 && PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    return tensor_of(self, place < 0 ? place + count_tensors(self) : place);
  }
  Py_ssize_t begin = 0, end = 0, stride = 0;
  if (PySlice_Unpack(key, &begin, &end, &stride) != 0) {
    return nullptr;
  }
  const Py_ssize_t count =
      PySlice_AdjustIndices(count_tensors(self), &begin, &end, stride);
  std::vector<at::Tensor> chosen;
  chosen.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; i++) {
    chosen.push_back(held_by(self)[static_cast<size_t>(begin + i * stride)]);
  }
  return tensors_of(std::move(chosen));
  END_HANDLE_TH_ERRORS
}

PyType_Slot tensors_slots[] = {
    {Py_tp_doc, const_cast<char*>("Tensors, of which each gets its object when asked for.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_tensors)},
    {Py_sq_length, reinterpret_cast<void*>(count_tensors)},
    {Py_sq_item, reinterpret_cast<void*>(tensor_of)},
    {Py_mp_length, reinterpret_cast<void*>(count_tensors)},
    {Py_mp_subscript, reinterpret_cast<void*>(some_tensors)},
    {0, nullptr},
};

PyType_Spec tensors_spec = {
    "gradscale_looks.Tensors",
    sizeof(Tensors),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_SEQUENCE,
    tensors_slots};

// A list of tensors, or `Tensors`; invalid if it is neither.
class Row {
 public:
  explicit Row(PyObject* object)
      : list_(PyList_Check(object) ? object : nullptr),
        held_(Py_TYPE(object) == tensors_type ? &held_by(object) : nullptr) {}
  bool valid() const {
    return list_ != nullptr || held_ != nullptr;
  }
  int64_t size() const {
    return list_ != nullptr ? PyList_GET_SIZE(list_)
                            : static_cast<int64_t>(held_->size());
  }
  // Null where it is of a class of its own, or no tensor at all.
  const at::Tensor* at(int64_t place) const {
    if (held_ != nullptr) {
      return &(*held_)[static_cast<size_t>(place)];
    }
    PyObject* object = PyList_GET_ITEM(list_, place);
    return THPVariable_CheckExact(object) ? &THPVariable_Unpack(object) : nullptr;
  }

 private:
  PyObject* list_;
  const std::vector<at::Tensor>* held_;
};

// Backward has pushed the gradients out of the caches. So the loop over them begins AHEAD
// places early, and fetches each link by link; between two links pass AWAY places, which
// is time enough for one to arrive.
constexpr int64_t AWAY = 8;
constexpr int64_t AHEAD = 5 * AWAY;

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

// The object that stands for a tensor in Python; null where nobody has asked for one.
PyObject* object_of(const c10::TensorImpl* tensor) {
  return tensor->pyobj_slot()->load_pyobj();
}

// The tensor at a place of a list; null where there is none.
const c10::TensorImpl* tensor_at(PyObject* list, int64_t place) {
  if (place < 0 || place >= PyList_GET_SIZE(list)) {
    return nullptr;
  }
  PyObject* object = PyList_GET_ITEM(list, place);
  return THPVariable_CheckExact(object)
      ? THPVariable_Unpack(object).unsafeGetTensorImpl()
      : nullptr;
}

// For a loop over gradients that has come to this place, perhaps before the first.
void fetch_grads(PyObject* params, int64_t place) {
  const int64_t furthest = place + AHEAD;
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
    fetch_behind(grad->version_counter());
    if (grad->has_storage()) {
      fetch(grad->unsafe_storage().unsafeGetStorageImpl());
    }
    __builtin_prefetch(object_of(grad));
  }
}

// For a loop over the tensors of a list and their memory, likewise.
void fetch_tensors(PyObject* list, int64_t place) {
  const int64_t furthest = place + 3 * AWAY;
  if (furthest >= 0 && furthest < PyList_GET_SIZE(list)) {
    __builtin_prefetch(PyList_GET_ITEM(list, furthest));
  }
  if (const auto* tensor = tensor_at(list, place + 2 * AWAY)) {
    fetch(tensor);
  }
  if (const auto* tensor = tensor_at(list, place + AWAY)) {
    if (tensor->has_storage()) {
      fetch(tensor->unsafe_storage().unsafeGetStorageImpl());
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

// Whether a tensor is what its class says, its values are those that lie in its memory,
// and no code of others answers for it: neither Python's, nor that of a transformation,
// nor that of an exotic kind of tensor.
bool is_ordinary(const c10::TensorImpl* tensor) {
  constexpr auto known = c10::DispatchKeySet(
                             {c10::DispatchKey::Dense,
                              c10::DispatchKey::AutogradFunctionality,
                              c10::DispatchKey::ADInplaceOrView}) |
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  return (tensor->key_set() | known) == known;
}

// Whether memory is copied, or made, when it is first written to. Older versions of
// PyTorch know no other reason than a copy.
template <typename Storage>
auto is_made_on_write(const Storage& storage, int) -> decltype(storage.has_materializer()) {
  return storage.has_materializer();
}

template <typename Storage>
bool is_made_on_write(const Storage& storage, long) {
  return storage.data_ptr().get_deleter() == &c10::impl::cow::cow_deleter;
}

// The same as `address_of` without such a copy; 0 and `odd` where one would be made, and
// where the tensor must be asked by Python.
int64_t address_seen(const at::Tensor& tensor, bool& odd) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!is_ordinary(impl) || !impl->has_storage()) {
    odd = true;
    return 0;
  }
  const c10::StorageImpl& storage = *impl->unsafe_storage().unsafeGetStorageImpl();
  // The first of the two, where there is one: 0 is an int.
  odd |= is_made_on_write(storage, 0);
  const int64_t begin = reinterpret_cast<int64_t>(storage.data_ptr().get());
  const int64_t offset = impl->storage_offset() * static_cast<int64_t>(impl->itemsize());
  return impl->is_empty() ? 0 : begin + offset;
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

// What was seen of the gradients of some parameters.
struct Seen {
  explicit Seen(size_t count)
      : grads(count), addresses(count), versions(count), numels(count) {}
  // Null where there is none.
  std::vector<const at::Tensor*> grads;
  Numbers addresses, versions, numels;
  // Some are missing, to be copied on write, views, or on other devices.
  std::atomic<bool> missing{false}, lazy{false}, views{false}, elsewhere{false};
  // One is so different that Python must look.
  std::atomic<bool> odd{false};
};

// Looks at the gradients; those that are there are like the first.
void see(PyObject* params, const at::Tensor& first, Seen& seen) {
  const auto look = [&](int64_t begin, int64_t end) {
    bool missing = false, lazy = false, views = false, elsewhere = false, odd = false;
    for (int64_t i = begin - AHEAD; i < end; i++) {
      fetch_grads(params, i);
      if (i < begin) {
        continue;
      }
      PyObject* object = PyList_GET_ITEM(params, i);
      if (!THPVariable_CheckExact(object)) {
        odd = true;
        break;
      }
      const at::Tensor& param = THPVariable_Unpack(object);
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (!grad.defined()) {
        missing = true;
        // Asked for the gradient of one that is no leaf, Python warns.
        odd |= !param.is_leaf();
        continue;
      }
      const c10::TensorImpl* impl = grad.unsafeGetTensorImpl();
      const PyObject* known = object_of(impl);
      const bool is_tensor = known == nullptr ||
          reinterpret_cast<const PyObject*>(Py_TYPE(known)) == THPVariableClass;
      if (!is_tensor || !is_ordinary(impl) || grad.is_inference() ||
          grad.scalar_type() != first.scalar_type() || !grad.is_contiguous()) {
        odd = true;
        break;
      }
      seen.grads[i] = &grad;
      seen.addresses[i] = address_seen(grad, lazy);
      seen.numels[i] = grad.numel();
      seen.versions[i] = version_of(grad);
      views |= grad.is_view();
      elsewhere |= grad.get_device() != first.get_device();
    }
    const auto note = [](std::atomic<bool>& all, bool one) {
      if (one) {
        all = true;
      }
    };
    note(seen.missing, missing);
    note(seen.lazy, lazy);
    note(seen.views, views);
    note(seen.elsewhere, elsewhere);
    note(seen.odd, odd);
  };
  if (!gradscale::share(PyList_GET_SIZE(params), look)) {
    seen.odd = true;
  }
}

// Drops the places where there is no gradient, and lists the owners of the others.
bool close_up(Seen& seen, PyObject* params, PyObject* owners) {
  size_t to = 0;
  for (size_t from = 0; from < seen.grads.size(); from++) {
    if (seen.grads[from] == nullptr) {
      continue;
    }
    seen.grads[to] = seen.grads[from];
    seen.addresses[to] = seen.addresses[from];
    seen.versions[to] = seen.versions[from];
    seen.numels[to] = seen.numels[from];
    to++;
    PyObject* owner = PyList_GET_ITEM(params, static_cast<Py_ssize_t>(from));
    if (PyList_Append(owners, owner) != 0) {
      return false;
    }
  }
  seen.grads.resize(to);
  for (Numbers* numbers : {&seen.addresses, &seen.versions, &seen.numels}) {
    numbers->resize(to);
  }
  return true;
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
  // First of all: making a list may collect garbage, which runs code of others.
  Owned owners(PyList_New(0));
  if (owners.get() == nullptr) {
    return nullptr;
  }
  const Py_ssize_t count = PyList_GET_SIZE(params);
  const at::Tensor* first = nullptr;
  for (Py_ssize_t i = 0; i < count && first == nullptr; i++) {
    PyObject* object = PyList_GET_ITEM(params, i);
    if (!THPVariable_CheckExact(object)) {
      Py_RETURN_NONE;
    }
    const at::Tensor& grad = THPVariable_Unpack(object).unsafeGetTensorImpl()->grad();
    first = grad.defined() ? &grad : nullptr;
  }
  if (first == nullptr || !is_ordinary(first->unsafeGetTensorImpl()) ||
      !accepted(first->scalar_type(), allow_fp16 != 0)) {
    Py_RETURN_NONE;
  }
  Seen seen(static_cast<size_t>(count));
  see(params, *first, seen);
  if (seen.odd) {
    Py_RETURN_NONE;
  }
  // From here on they are held, whatever code runs.
  std::vector<at::Tensor> held;
  held.reserve(static_cast<size_t>(count));
  for (const at::Tensor* grad : seen.grads) {
    if (grad != nullptr) {
      held.push_back(*grad);
    }
  }
  Owned tensors(tensors_of(std::move(held)));
  if (tensors.get() == nullptr ||
      (seen.missing && !close_up(seen, params, owners.get()))) {
    return nullptr;
  }
  const std::vector<at::Tensor>& grads = held_by(tensors.get());
  if (seen.lazy) {
    try {
      for (size_t i = 0; i < grads.size(); i++) {
        seen.addresses[i] = address_of(grads[i]);
      }
    } catch (const c10::Error&) {
      Py_RETURN_NONE;
    }
  }
  if (!same_as_before(seen.addresses, grads[0], kind, before) &&
      (seen.elsewhere || seen.views || !distinct(seen.addresses))) {
    Py_RETURN_NONE;
  }
  Owned begins(array_of(seen.addresses));
  Owned marks(array_of(seen.versions));
  Owned sizes(array_of(seen.numels));
  if (begins.get() == nullptr || marks.get() == nullptr || sizes.get() == nullptr) {
    return nullptr;
  }
  return PyTuple_Pack(
      5,
      seen.missing ? owners.get() : params,
      tensors.get(),
      begins.get(),
      marks.get(),
      sizes.get());
  END_HANDLE_TH_ERRORS
}

// Whether the gradients are these tensors, where they began and in these versions, one
// for each parameter. Sets `odd` where one of them must be looked at by itself.
bool all_untouched(
    PyObject* params,
    const Row& tensors,
    const int64_t* begins,
    const int64_t* marks,
    std::atomic<bool>& odd) {
  std::atomic<bool> touched{false};
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      PyObject* param = PyList_GET_ITEM(params, i);
      const at::Tensor* tensor = tensors.at(i);
      if (!THPVariable_CheckExact(param) || tensor == nullptr) {
        odd = true;
        return;
      }
      const at::Tensor& grad = THPVariable_Unpack(param).unsafeGetTensorImpl()->grad();
      if (!grad.defined() || tensor->is_inference()) {
        odd = true;
        return;
      }
      bool special = false;
      const int64_t address = address_seen(*tensor, special);
      if (special) {
        odd = true;
        return;
      }
      if (!tensor->is_same(grad) || address != begins[i] ||
          version_of(*tensor) != marks[i]) {
        touched = true;
        return;
      }
    }
  };
  if (!gradscale::share(PyList_GET_SIZE(params), look)) {
    odd = true;
  }
  return !touched;
}

PyObject* untouched(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* params = nullptr;
  PyObject* gathered = nullptr;
  PyObject* addresses = nullptr;
  PyObject* versions = nullptr;
  if (!PyArg_ParseTuple(args, "OOOO", &params, &gathered, &addresses, &versions)) {
    return nullptr;
  }
  const Row tensors(gathered);
  if (!PyList_Check(params) || !tensors.valid()) {
    Py_RETURN_NONE;
  }
  const Held begins(addresses), marks(versions);
  const Py_ssize_t count = PyList_GET_SIZE(params);
  const Py_ssize_t expected = tensors.size();
  if (!begins.valid() || begins.size() != expected || !marks.valid() ||
      marks.size() != expected) {
    Py_RETURN_NONE;
  }
  if (count == expected && gradscale::is_shared(count)) {
    std::atomic<bool> odd{false};
    const bool same = all_untouched(params, tensors, begins.data(), marks.data(), odd);
    if (!odd) {
      return PyBool_FromLong(same);
    }
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!THPVariable_CheckExact(PyList_GET_ITEM(params, i))) {
      Py_RETURN_NONE;
    }
  }
  Py_ssize_t place = 0;
  bool same = true;
  for (Py_ssize_t i = 0; i < count && same; i++) {
    const at::Tensor& grad = grad_of(THPVariable_Unpack(PyList_GET_ITEM(params, i)));
    if (!grad.defined()) {
      same = count != expected;
      continue;
    }
    if (place == expected) {
      same = false;
      break;
    }
    const at::Tensor* tensor = tensors.at(place);
    if (tensor == nullptr) {
      Py_RETURN_NONE;
    }
    bool odd = false;
    const int64_t address = address_seen(*tensor, odd);
    if (odd) {
      Py_RETURN_NONE;
    }
    same = tensor->is_same(grad) && address == begins.data()[place] &&
        version_of(*tensor) == marks.data()[place];
    place++;
  }
  return PyBool_FromLong(same && place == expected);
  END_HANDLE_TH_ERRORS
}

// A number of each tensor of a row.
template <typename Look>
PyObject* of_each(PyObject* object, Look look) {
  HANDLE_TH_ERRORS
  const Row tensors(object);
  if (!tensors.valid()) {
    Py_RETURN_NONE;
  }
  Numbers found(static_cast<size_t>(tensors.size()));
  for (int64_t i = 0; i < tensors.size(); i++) {
    const at::Tensor* tensor = tensors.at(i);
    if (tensor == nullptr) {
      Py_RETURN_NONE;
    }
    found[i] = look(*tensor);
  }
  return array_of(found);
  END_HANDLE_TH_ERRORS
}

PyObject* addresses(PyObject*, PyObject* tensors) {
  return of_each(tensors, address_of);
}

int64_t storage_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl());
}

PyObject* storages(PyObject*, PyObject* tensors) {
  return of_each(tensors, storage_of);
}

PyObject* survey(PyObject*, PyObject* lists) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(lists)) {
    Py_RETURN_NONE;
  }
  Owned rows(PyList_New(0));
  if (rows.get() == nullptr) {
    return nullptr;
  }
  Numbers numels;
  bool contiguous = true;
  const Py_ssize_t last = PyList_GET_SIZE(lists) - 1;
  for (Py_ssize_t row = 0; row <= last; row++) {
    PyObject* tensors = PyList_GET_ITEM(lists, row);
    if (!PyList_Check(tensors)) {
      Py_RETURN_NONE;
    }
    const auto count = static_cast<size_t>(PyList_GET_SIZE(tensors));
    Numbers begins(count), sizes(count);
    for (size_t i = 0; i < count; i++) {
      PyObject* object = PyList_GET_ITEM(tensors, static_cast<Py_ssize_t>(i));
      if (!THPVariable_CheckExact(object)) {
        Py_RETURN_NONE;
      }
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (!is_ordinary(tensor.unsafeGetTensorImpl())) {
        Py_RETURN_NONE;
      }
      begins[i] = address_of(tensor);
      sizes[i] = tensor.numel();
      contiguous &= tensor.is_contiguous();
    }
    Owned found(array_of(begins));
    if (found.get() == nullptr || PyList_Append(rows.get(), found.get()) != 0) {
      return nullptr;
    }
    if (row == 0) {
      numels = std::move(sizes);
    } else if (row < last) {
      contiguous &= sizes == numels;
    }
  }
  Owned sizes(array_of(numels));
  if (sizes.get() == nullptr) {
    return nullptr;
  }
  return PyTuple_Pack(
      3, rows.get(), sizes.get(), contiguous ? Py_True : Py_False);
  END_HANDLE_TH_ERRORS
}

PyObject* as_large(PyObject*, PyObject* lists) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(lists) || PyList_GET_SIZE(lists) == 0) {
    Py_RETURN_NONE;
  }
  std::vector<Row> rows;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists); i++) {
    rows.emplace_back(PyList_GET_ITEM(lists, i));
    if (!rows.back().valid()) {
      Py_RETURN_NONE;
    }
    if (rows.back().size() != rows.front().size()) {
      Py_RETURN_FALSE;
    }
  }
  std::atomic<bool> odd{false}, differ{false};
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t expected = -1;
      for (const Row& row : rows) {
        const at::Tensor* tensor = row.at(i);
        if (tensor == nullptr || !is_ordinary(tensor->unsafeGetTensorImpl())) {
          odd = true;
          return;
        }
        expected = expected < 0 ? tensor->numel() : expected;
        if (tensor->numel() != expected) {
          differ = true;
          return;
        }
      }
    }
  };
  if (!gradscale::share(rows.front().size(), look) || odd) {
    Py_RETURN_NONE;
  }
  return PyBool_FromLong(!differ);
  END_HANDLE_TH_ERRORS
}

// Whether the tensors of a list begin where they did, and have as many elements, without
// gaps. Sets `odd` where Python must look.
bool all_as_before(
    PyObject* tensors,
    const int64_t* begins,
    const int64_t* numels,
    std::atomic<bool>& odd) {
  std::atomic<bool> moved{false};
  const auto look = [&](int64_t begin, int64_t end) {
    bool same = true, special = false;
    for (int64_t i = begin - 3 * AWAY; i < end; i++) {
      fetch_tensors(tensors, i);
      if (i < begin) {
        continue;
      }
      PyObject* object = PyList_GET_ITEM(tensors, i);
      if (!THPVariable_CheckExact(object)) {
        special = true;
        break;
      }
      const at::Tensor& tensor = THPVariable_Unpack(object);
      same &= address_seen(tensor, special) == begins[i];
      if (special) {
        break;
      }
      same &= tensor.numel() == numels[i] && tensor.is_contiguous();
    }
    if (special) {
      odd = true;
    } else if (!same) {
      moved = true;
    }
  };
  if (!gradscale::share(PyList_GET_SIZE(tensors), look)) {
    odd = true;
  }
  return !moved;
}

PyObject* as_before(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* lists = nullptr;
  PyObject* rows = nullptr;
  PyObject* sizes = nullptr;
  if (!PyArg_ParseTuple(
          args, "O!O!O", &PyList_Type, &lists, &PyList_Type, &rows, &sizes)) {
    return nullptr;
  }
  const Held numels(sizes);
  if (!numels.valid()) {
    Py_RETURN_NONE;
  }
  if (PyList_GET_SIZE(lists) != PyList_GET_SIZE(rows)) {
    Py_RETURN_FALSE;
  }
  for (Py_ssize_t row = 0; row < PyList_GET_SIZE(lists); row++) {
    PyObject* tensors = PyList_GET_ITEM(lists, row);
    const Held begins(PyList_GET_ITEM(rows, row));
    if (!PyList_Check(tensors) || !begins.valid()) {
      Py_RETURN_NONE;
    }
    const Py_ssize_t count = PyList_GET_SIZE(tensors);
    if (count != begins.size() || count != numels.size()) {
      Py_RETURN_FALSE;
    }
    std::atomic<bool> odd{false};
    const bool same = all_as_before(tensors, begins.data(), numels.data(), odd);
    if (odd) {
      // Python copies what is copied on write, and raises where there is no address.
      Py_RETURN_NONE;
    }
    if (!same) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
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
  std::atomic<bool> odd{false};
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (!THPVariable_CheckExact(PyList_GET_ITEM(tensors, i))) {
        odd = true;
      }
    }
  };
  if (!gradscale::share(count, look) || odd) {
    Py_RETURN_NONE;
  }
  gradscale::share(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  });
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* scalars(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(object)) {
    Py_RETURN_NONE;
  }
  const at::Tensor& whole = THPVariable_Unpack(object);
  if (!is_ordinary(whole.unsafeGetTensorImpl()) || whole.dim() != 1) {
    Py_RETURN_NONE;
  }
  Owned found(PyTuple_New(whole.numel()));
  if (found.get() == nullptr) {
    return nullptr;
  }
  for (int64_t i = 0; i < whole.numel(); i++) {
    auto one = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
    one.unsafeGetTensorImpl()->set_storage_offset(
        whole.storage_offset() + i * whole.stride(0));
    one.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(), at::IntArrayRef());
    PyObject* scalar = THPVariable_Wrap(one);
    if (scalar == nullptr) {
      return nullptr;
    }
    PyTuple_SET_ITEM(found.get(), i, scalar);
  }
  return Py_NewRef(found.get());
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

// Whether each dictionary holds just as many values, these in all. Sets `odd` where one
// must be looked at by itself.
bool same_entries(
    const std::vector<PyObject*>& dictionaries,
    PyObject* values,
    std::atomic<bool>& odd) {
  const auto owners = static_cast<Py_ssize_t>(dictionaries.size());
  const Py_ssize_t each = owners == 0 ? 0 : PyList_GET_SIZE(values) / owners;
  std::atomic<bool> differ{each * owners != PyList_GET_SIZE(values)};
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      PyObject* entries = dictionaries[i];
      if (!PyDict_Check(entries) || PyDict_GET_SIZE(entries) != each) {
        odd = true;
        return;
      }
      Py_ssize_t at = 0, value = i * each;
      PyObject *name = nullptr, *entry = nullptr;
      while (PyDict_Next(entries, &at, &name, &entry)) {
        if (entry != PyList_GET_ITEM(values, value++)) {
          differ = true;
        }
      }
    }
  };
  if (differ || !gradscale::share(owners, look)) {
    odd = true;
  }
  return !differ;
}

PyObject* same_state(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
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
  std::vector<PyObject*> dictionaries;
  dictionaries.reserve(static_cast<size_t>(owner_count));
  Py_ssize_t at = 0;
  PyObject *key = nullptr, *entries = nullptr;
  bool fits = true;
  while (PyDict_Next(state, &at, &key, &entries)) {
    const auto owner = static_cast<Py_ssize_t>(dictionaries.size());
    fits &= key == PyList_GET_ITEM(owners, owner);
    dictionaries.push_back(entries);
  }
  std::atomic<bool> odd{false};
  const bool same = same_entries(dictionaries, values, odd);
  if (!odd) {
    return PyBool_FromLong(fits && same);
  }
  Py_ssize_t value = 0;
  for (PyObject* one : dictionaries) {
    if (!PyDict_Check(one)) {
      Py_RETURN_NONE;
    }
    Py_ssize_t inner = 0;
    PyObject *name = nullptr, *entry = nullptr;
    while (fits && PyDict_Next(one, &inner, &name, &entry)) {
      fits = value < value_count && entry == PyList_GET_ITEM(values, value);
      value++;
    }
  }
  return PyBool_FromLong(fits && value == value_count);
  END_HANDLE_TH_ERRORS
}

// For tests: how many threads help, and from how many tensors on; -1 as it should be.
PyObject* set_crew(PyObject*, PyObject* args) {
  int helpers = -1, few = -1;
  if (!PyArg_ParseTuple(args, "ii", &helpers, &few)) {
    return nullptr;
  }
  gradscale::helpers_wanted = std::min(helpers, gradscale::MOST_HELPERS);
  gradscale::fewest = few < 0 ? gradscale::FEW : few;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, nullptr},
    {"untouched", untouched, METH_VARARGS, nullptr},
    {"addresses", addresses, METH_O, nullptr},
    {"storages", storages, METH_O, nullptr},
    {"survey", survey, METH_O, nullptr},
    {"as_before", as_before, METH_VARARGS, nullptr},
    {"as_large", as_large, METH_O, nullptr},
    {"versions", versions, METH_O, nullptr},
    {"note_writes", note_writes, METH_O, nullptr},
    {"scalars", scalars, METH_O, nullptr},
    {"same", same, METH_VARARGS, nullptr},
    {"same_state", same_state, METH_VARARGS, nullptr},
    {"set_crew", set_crew, METH_VARARGS, nullptr},
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
  tensors_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tensors_spec));
  if (array_type == nullptr || defaultdict_type == nullptr || tensors_type == nullptr) {
    return nullptr;
  }
  return PyModule_Create(&definition);
}
