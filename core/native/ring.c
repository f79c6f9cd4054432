/* The hot path of the shared-memory channel in C: frames that lie in line, and waiting for them.
 *
 * It does what `InlineWriter`, `InlineReader` and `ReplyRings` of
 * hardpoint/rpc/shared_memory/inline.py do, which are the reference: same memory, same results, so
 * that one end may use these and the other those. The layout is that of layout.py, which hands its
 * numbers over: nothing of it is known here but the header of a frame and what the words HEAD,
 * WRITER_CPU, WRITER_WAITS and CLOSED mean.
 *
 * Everything runs under the interpreter's lock save the waiting, which runs without it; `pins`
 * keeps the memory mapped meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <marshal.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint32_t size;
    uint8_t storage, kind;
    uint16_t named;
    uint64_t call_id;
    uint32_t generation;
    int32_t rank;
} Header;
_Static_assert(sizeof(Header) == 24, "the header of a frame has no gaps");

enum { HEAD = 0, WRITER_CPU = 1, WRITER_WAITS = 8, CLOSED = 16, INLINE = 1, NOTHING = 2, VALUE = 3, PICKLED = 0x80 };
#define MARSHAL_VERSION 2
#define INTERFACE 5 /* as in inline.py: what is offered and how memory lies */

/* The memory of one ring. */
typedef struct {
    PyObject_HEAD
    Py_buffer view;
    char *base; /* NULL once it was given back */
    volatile uint64_t *words;
    int pins;
    uint64_t ring_at, mask;
    uint64_t head, limit, edge, largest, large_bytes; /* of a writer */
    Py_ssize_t flags_at, flags;
    uint64_t tail, tail_word; /* of a reader */
    int counted;              /* whether the event on which it slept has still to be read */
    PyObject *tell_room;
    char *crowd; /* file that counts those that run; NULL: whoever waits stays where it is */
    unsigned long long met, parted;
    int party, in_a_row; /* how many talk by this ring; how often the writer was met */
    uint64_t part_from, pause; /* ns */
} Ring;

static uint64_t load(volatile uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store(volatile uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static uint64_t padded(uint64_t size) { return (size + sizeof(Header) + 7) & ~(uint64_t)7; }

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int open_memory(Ring *self, PyObject *memory, Py_ssize_t least)
{
    if (PyObject_GetBuffer(memory, &self->view, PyBUF_WRITABLE) < 0)
        return -1;
    self->base = self->view.buf;
    self->words = (volatile uint64_t *)self->base;
    if (self->view.len < least || ((uintptr_t)self->base & 7)) {
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than its layout, or not aligned");
        return -1;
    }
    return 0;
}

static int is_open(Ring *self)
{
    if (self->base)
        return 1;
    PyErr_SetString(PyExc_ValueError, "this end of the ring was given back");
    return 0;
}

static PyObject *ring_release(Ring *self, PyObject *unused)
{
    if (self->base && !self->pins) { /* else whoever waits has it still; it goes with this object */
        self->base = NULL;
        self->words = NULL;
        PyBuffer_Release(&self->view);
    }
    Py_RETURN_NONE;
}

static int ring_traverse(Ring *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->tell_room);
    Py_VISIT(self->view.obj);
    return 0;
}

static int ring_clear(Ring *self)
{
    Py_CLEAR(self->tell_room);
    return 0;
}

static void ring_dealloc(Ring *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    ring_clear(self);
    if (self->base)
        PyBuffer_Release(&self->view);
    PyMem_Free(self->crowd);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Writing. */

static int writer_init(Ring *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "ring_at", "capacity", "flags_at", "flags", "large_bytes", NULL};
    PyObject *memory;
    unsigned long long ring_at, capacity, large_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKnnK", names, &memory, &ring_at, &capacity,
                                     &self->flags_at, &self->flags, &large_bytes))
        return -1;
    self->ring_at = ring_at;
    self->mask = capacity - 1;
    self->largest = capacity / 4;
    self->limit = capacity;
    self->edge = self->largest;
    self->large_bytes = large_bytes;
    return open_memory(self, memory, (Py_ssize_t)(ring_at + capacity));
}

typedef struct {
    uint64_t call_id;
    long kind, rank;
    unsigned long generation;
    PyObject *name;
} Ids;

/* Read (kind, call id, generation, rank, name), with which every message begins. */
static int read_ids(PyObject *const *args, Ids *ids)
{
    ids->kind = PyLong_AsLong(args[0]);
    ids->call_id = PyLong_AsUnsignedLongLong(args[1]);
    ids->generation = PyLong_AsUnsignedLong(args[2]);
    ids->rank = PyLong_AsLong(args[3]);
    ids->name = args[4];
    if (PyErr_Occurred())
        return -1;
    if (!PyBytes_CheckExact(ids->name) || ids->kind < 0 || ids->kind > 255 ||
        ids->generation > UINT32_MAX || ids->rank < INT32_MIN || ids->rank > INT32_MAX ||
        PyBytes_GET_SIZE(ids->name) > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "a frame's header cannot hold these numbers");
        return -1;
    }
    return 0;
}

/* Write a frame; return whether there was room for it without a break. */
static int put_frame(Ring *self, const Ids *ids, const char *data, uint64_t data_size)
{
    uint64_t named = (uint64_t)PyBytes_GET_SIZE(ids->name);
    uint64_t size = named + data_size, length = padded(size);
    if (data_size > self->largest || self->head + length > self->edge)
        return 0;
    char *at = self->base + self->ring_at + (self->head & self->mask);
    *(Header *)at = (Header){.size = (uint32_t)size, .storage = INLINE, .kind = (uint8_t)ids->kind,
                             .named = (uint16_t)named, .call_id = ids->call_id,
                             .generation = (uint32_t)ids->generation, .rank = (int32_t)ids->rank};
    at += sizeof(Header);
    memcpy(at, PyBytes_AS_STRING(ids->name), named);
    memcpy(at + named, data, data_size);
    self->head += length;
    self->words[WRITER_CPU] = (uint64_t)(sched_getcpu() + 1);
    store(&self->words[HEAD], self->head);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* whoever looks at flags next does so after that */
    return 1;
}

static PyObject *writer_put(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    Ids ids;
    Py_buffer data;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "put takes 6 arguments, not %zd", count);
    if (!is_open(self) || read_ids(args, &ids) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[5], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    int written = put_frame(self, &ids, data.buf, (uint64_t)data.len);
    PyBuffer_Release(&data);
    return PyBool_FromLong(written);
}

static int is_plain(PyObject *value, uint64_t large_bytes)
{
    if (PyBytes_CheckExact(value))
        return (uint64_t)PyBytes_GET_SIZE(value) < large_bytes;
    return PyLong_CheckExact(value) || PyUnicode_CheckExact(value) || value == Py_None ||
           PyFloat_CheckExact(value) || PyBool_Check(value) || PyComplex_CheckExact(value);
}

/* Write a plain value or a tuple of them; None if it is neither, else whether there was room. */
static PyObject *writer_put_plain(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    Ids ids;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "put_plain takes 6 arguments, not %zd", count);
    if (!is_open(self))
        return NULL;
    PyObject *value = args[5];
    if (PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
            if (!is_plain(PyTuple_GET_ITEM(value, i), self->large_bytes))
                Py_RETURN_NONE;
    } else if (!is_plain(value, self->large_bytes))
        Py_RETURN_NONE;
    if (read_ids(args, &ids) < 0)
        return NULL;
    PyObject *data = PyMarshal_WriteObjectToString(value, MARSHAL_VERSION);
    if (!data)
        return NULL;
    int written = put_frame(self, &ids, PyBytes_AS_STRING(data), (uint64_t)PyBytes_GET_SIZE(data));
    Py_DECREF(data);
    return PyBool_FromLong(written);
}

/* Ring the events of those whose flag is set, and take the flag away. An event's descriptor is -1
 * before it is closed, so what is rung under the interpreter's lock is open.
 */
static PyObject *writer_wake(Ring *self, PyObject *events)
{
    if (!PyTuple_CheckExact(events) || PyTuple_GET_SIZE(events) != self->flags)
        return PyErr_Format(PyExc_ValueError, "wake takes a tuple of %zd events", self->flags);
    for (Py_ssize_t i = 0; self->base && i < self->flags; i++) {
        if (!self->words[self->flags_at + i])
            continue;
        PyObject *number = PyObject_GetAttrString(PyTuple_GET_ITEM(events, i), "fd");
        int event = number ? (int)PyLong_AsLong(number) : -1;
        Py_XDECREF(number);
        if (PyErr_Occurred())
            return NULL;
        store(&self->words[self->flags_at + i], 0);
        uint64_t one = 1;
        if (event >= 0 && write(event, &one, sizeof(one)) < 0 && errno != EAGAIN)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef writer_methods[] = {
    {"put", (PyCFunction)(void (*)(void))writer_put, METH_FASTCALL, NULL},
    {"put_plain", (PyCFunction)(void (*)(void))writer_put_plain, METH_FASTCALL, NULL},
    {"wake", (PyCFunction)writer_wake, METH_O, NULL},
    {"release", (PyCFunction)ring_release, METH_NOARGS, NULL},
    {NULL}};
static PyMemberDef writer_members[] = {{"head", T_ULONGLONG, offsetof(Ring, head), 0, NULL},
                                       {"limit", T_ULONGLONG, offsetof(Ring, limit), 0, NULL},
                                       {"edge", T_ULONGLONG, offsetof(Ring, edge), 0, NULL},
                                       {NULL}};
static PyType_Slot writer_slots[] = {{Py_tp_init, writer_init},       {Py_tp_methods, writer_methods},
                                     {Py_tp_members, writer_members}, {Py_tp_dealloc, ring_dealloc},
                                     {Py_tp_traverse, ring_traverse}, {Py_tp_clear, ring_clear},
                                     {Py_tp_new, PyType_GenericNew},  {0, NULL}};
static PyType_Spec writer_spec = {"hardpoint.rpc.shared_memory._native.InlineWriter", sizeof(Ring), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, writer_slots};

/* Reading. */

static int reader_init(Ring *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "ring_at", "capacity", "tail_word", "tell_room",
                            "crowd", "party", NULL};
    PyObject *memory, *tell_room;
    unsigned long long ring_at, capacity, tail_word;
    const char *crowd = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKKO|zi", names, &memory, &ring_at, &capacity,
                                     &tail_word, &tell_room, &crowd, &self->party))
        return -1;
    if (crowd && !(self->crowd = PyMem_Malloc(strlen(crowd) + 1))) {
        PyErr_NoMemory();
        return -1;
    }
    if (crowd)
        strcpy(self->crowd, crowd);
    self->ring_at = ring_at;
    self->mask = capacity - 1;
    self->tail_word = tail_word;
    if (open_memory(self, memory, (Py_ssize_t)(ring_at + capacity)) < 0)
        return -1;
    self->tail = self->words[tail_word];
    Py_XSETREF(self->tell_room, Py_NewRef(tell_room));
    return 0;
}

/* Whether the next frame is whole, in line and true: `header` and `at` (its name) are set then. */
static int next_inline(Ring *self, Header *header, char **at)
{
    uint64_t available = load(&self->words[HEAD]) - self->tail;
    uint64_t place = self->tail & self->mask;
    *at = self->base + self->ring_at + place;
    *header = *(Header *)*at; /* a copy: what is checked is what is used */
    uint64_t length = padded(header->size);
    *at += sizeof(Header);
    return (int64_t)available > 0 && header->storage == INLINE && length <= available &&
           header->named <= header->size &&
           place + length <= self->mask + 1;
}

static int advance(Ring *self, const Header *header)
{
    self->tail += padded(header->size);
    store(&self->words[self->tail_word], self->tail);
    if (!self->words[WRITER_WAITS] || !self->tell_room)
        return 0;
    PyObject *done = PyObject_CallNoArgs(self->tell_room);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *empty_tuple;

/* Return the next message; None if there is none; NotImplemented if it does not lie in line. */
static PyObject *reader_take(Ring *self, PyObject *unused)
{
    Header header;
    char *at;
    if (!is_open(self))
        return NULL;
    if ((int64_t)(load(&self->words[HEAD]) - self->tail) <= 0)
        Py_RETURN_NONE;
    if (!next_inline(self, &header, &at))
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *message = PyTuple_New(7);
    if (!message)
        return NULL;
    PyTuple_SET_ITEM(message, 0, PyLong_FromLong(header.kind));
    PyTuple_SET_ITEM(message, 1, PyLong_FromUnsignedLongLong(header.call_id));
    PyTuple_SET_ITEM(message, 2, PyLong_FromUnsignedLong(header.generation));
    PyTuple_SET_ITEM(message, 3, PyLong_FromLong(header.rank));
    PyTuple_SET_ITEM(message, 4, PyBytes_FromStringAndSize(at, header.named));
    PyTuple_SET_ITEM(message, 5, PyBytes_FromStringAndSize(at + header.named, header.size - header.named));
    PyTuple_SET_ITEM(message, 6, Py_NewRef(empty_tuple));
    for (int i = 0; i < 6; i++)
        if (!PyTuple_GET_ITEM(message, i))
            goto failed;
    if (advance(self, &header) == 0)
        return message;
failed:
    Py_DECREF(message);
    return NULL;
}

/* Parting. Two that talk by yielding one processor to each other take twice as long as on two, and
 * the kernel leaves them there for up to a tenth of a second, since nobody seems to wait. So a
 * reader to which that happens IN_A_ROW times goes to another processor if one is idle. Where it
 * may run is afterwards what it was before. What was in vain is tried again after twice the time.
 */
enum { IN_A_ROW = 8, CPUS = 8192, MASK = CPUS / 8 };
static const uint64_t SHORTEST_PAUSE = 5000000, LONGEST_PAUSE = 160000000;
typedef union {
    unsigned char bytes[MASK];
    cpu_set_t set;
} Cpus;

/* How many threads of this machine run or could: the fourth number of /proc/loadavg. */
static int running(const char *path)
{
    char text[128];
    int count = INT_MAX, file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return count;
    ssize_t size = read(file, text, sizeof(text) - 1);
    close(file);
    text[size < 0 ? 0 : size] = 0;
    return sscanf(text, "%*s %*s %*s %d/", &count) == 1 ? count : INT_MAX;
}

/* Have this thread, one of `party`, leave `cpu`; whether it did. */
static int step_aside(int cpu, int party, const char *crowd)
{
    Cpus mine, others, seen;
    if (sched_getaffinity(0, MASK, &mine.set) < 0 || !CPU_ISSET_S(cpu, MASK, &mine.set))
        return 0;
    int usable = CPU_COUNT_S(MASK, &mine.set);
    if (usable < 2 || running(crowd) > party + usable / 2 - 1) /* these, and few others */
        return 0;
    others = mine;
    CPU_CLR_S(cpu, MASK, &others.set);
    if (sched_setaffinity(0, MASK, &others.set) < 0)
        return 0;
    seen = others;
    sched_getaffinity(0, MASK, &seen.set);
    for (int i = 0; i < MASK; i++)
        if (seen.bytes[i] & ~others.bytes[i])
            return 1; /* somebody else has said meanwhile where it may run */
    /* All first: a thread that was never confined goes on to follow its cpuset. */
    memset(&others, -1, sizeof(others));
    if (sched_setaffinity(0, MASK, &others.set) < 0 || sched_getaffinity(0, MASK, &seen.set) < 0 ||
        !CPU_EQUAL_S(MASK, &seen.set, &mine.set))
        sched_setaffinity(0, MASK, &mine.set);
    return 1;
}

/* A frame has come for which this thread was waiting. */
static void look_for_writer(Ring *self)
{
    int cpu = sched_getcpu();
    if (cpu < 0 || self->words[WRITER_CPU] != (uint64_t)cpu + 1) {
        self->in_a_row = 0;
        return;
    }
    self->met++;
    if (++self->in_a_row < IN_A_ROW)
        return;
    self->in_a_row = 0;
    uint64_t now = now_ns();
    if (now < self->part_from)
        return;
    int again = now - self->part_from < self->pause;
    self->pause = !again                         ? SHORTEST_PAUSE
                  : self->pause < LONGEST_PAUSE ? 2 * self->pause
                                                 : LONGEST_PAUSE;
    self->part_from = now + self->pause;
    self->parted += step_aside(cpu, self->party, self->crowd);
}

/* Return the next message as take does; if none is here, yield the processor until one is, for so
 * many seconds at most.
 */
static PyObject *reader_next(Ring *self, PyObject *seconds)
{
    double budget = PyFloat_AsDouble(seconds);
    if (!is_open(self) || (budget == -1.0 && PyErr_Occurred()))
        return NULL;
    uint64_t tail = self->tail;
    if (budget > 0 && load(&self->words[HEAD]) == tail) {
        self->pins++;
        Py_BEGIN_ALLOW_THREADS
        uint64_t end = now_ns() + (uint64_t)(budget * 1e9);
        do /* to yield comes first: who is to run next may need this core */
            sched_yield();
        while (load(&self->words[HEAD]) == tail && now_ns() < end);
        if (self->crowd && load(&self->words[HEAD]) != tail)
            look_for_writer(self);
        Py_END_ALLOW_THREADS
        self->pins--;
    }
    return reader_take(self, NULL);
}

/* Sleep(event, seconds, flag): sleep until the event is rung, with the word `flag` set meanwhile,
 * unless a frame is here or the ring is closed; return whether a frame is here, or soon.
 */
static PyObject *reader_sleep(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "sleep takes 3 arguments, not %zd", count);
    int event = (int)PyLong_AsLong(args[0]);
    double seconds = PyFloat_AsDouble(args[1]);
    Py_ssize_t at = PyLong_AsSsize_t(args[2]);
    if (!is_open(self) || PyErr_Occurred())
        return NULL;
    if (at < 0 || (uint64_t)at >= self->ring_at / sizeof(uint64_t))
        return PyErr_Format(PyExc_ValueError, "there is no word %zd for a flag", at);
    volatile uint64_t *flag = &self->words[at];
    uint64_t counter;
    self->in_a_row = 0;
    if (self->counted) { /* a wake-up is taken away with the next sleep: what was waited for came first */
        self->counted = 0;
        if (read(event, &counter, sizeof(counter)) < 0 && errno != EAGAIN)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    store(flag, 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int found = load(&self->words[HEAD]) != self->tail, failed = 0;
    if (!found && !self->words[CLOSED]) {
        struct pollfd waited = {.fd = event, .events = POLLIN};
        self->pins++;
        Py_BEGIN_ALLOW_THREADS
        self->counted = poll(&waited, 1, (int)(seconds * 1e3)) > 0;
        failed = self->counted ? 0 : errno;
        Py_END_ALLOW_THREADS
        self->pins--;
        found = !*flag || load(&self->words[HEAD]) != self->tail;
    }
    if (found)
        store(flag, 0);
    if (failed == EINTR && PyErr_CheckSignals() < 0)
        return NULL;
    return PyBool_FromLong(found);
}

static PyMethodDef reader_methods[] = {{"take", (PyCFunction)reader_take, METH_NOARGS, NULL},
                                       {"next", (PyCFunction)reader_next, METH_O, NULL},
                                       {"sleep", (PyCFunction)(void (*)(void))reader_sleep,
                                        METH_FASTCALL, NULL},
                                       {"release", (PyCFunction)ring_release, METH_NOARGS, NULL},
                                       {NULL}};
static PyMemberDef reader_members[] = {{"tail", T_ULONGLONG, offsetof(Ring, tail), 0, NULL},
                                       {"met", T_ULONGLONG, offsetof(Ring, met), 0, NULL},
                                       {"parted", T_ULONGLONG, offsetof(Ring, parted), 0, NULL},
                                       {"in_a_row", T_INT, offsetof(Ring, in_a_row), 0, NULL},
                                       {NULL}};
static PyType_Slot reader_slots[] = {{Py_tp_init, reader_init},       {Py_tp_methods, reader_methods},
                                     {Py_tp_members, reader_members}, {Py_tp_dealloc, ring_dealloc},
                                     {Py_tp_traverse, ring_traverse}, {Py_tp_clear, ring_clear},
                                     {Py_tp_new, PyType_GenericNew},  {0, NULL}};
static PyType_Spec reader_spec = {"hardpoint.rpc.shared_memory._native.InlineReader", sizeof(Ring), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, reader_slots};

/* All reply rings at once. */

typedef struct {
    PyObject_HEAD
    PyObject *readers; /* a tuple of InlineReader */
} Rings;

static PyTypeObject *reader_type; /* of this process's one interpreter */

static int rings_init(Rings *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"readers", NULL};
    PyObject *readers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyTuple_Type, &readers))
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(readers); i++) {
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(readers, i), reader_type)) {
            PyErr_SetString(PyExc_TypeError, "readers must be of the type InlineReader");
            return -1;
        }
    }
    Py_XSETREF(self->readers, Py_NewRef(readers));
    return 0;
}

static Ring *ring_at(Rings *self, Py_ssize_t index)
{
    return (Ring *)PyTuple_GET_ITEM(self->readers, index);
}

static int rings_open(Rings *self)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->readers); i++)
        if (!is_open(ring_at(self, i)))
            return 0;
    return 1;
}

static int count_ready(Rings *self, Py_ssize_t rings)
{
    int ready = 0;
    for (Py_ssize_t i = 0; i < rings; i++) {
        Ring *ring = ring_at(self, i);
        ready += load(&ring->words[HEAD]) != ring->tail;
    }
    return ready;
}

static PyObject *rings_ready(Rings *self, PyObject *unused)
{
    if (!rings_open(self))
        return NULL;
    return PyLong_FromLong(count_ready(self, PyTuple_GET_SIZE(self->readers)));
}

/* Yield the processor until `wanted` rings have a reply, or for so many seconds since the last one
 * got one; return how many have.
 */
static PyObject *rings_spin(Rings *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "spin takes 2 arguments, not %zd", count);
    double budget = PyFloat_AsDouble(args[0]);
    long wanted = PyLong_AsLong(args[1]);
    if (!rings_open(self) || PyErr_Occurred())
        return NULL;
    Py_ssize_t rings = PyTuple_GET_SIZE(self->readers);
    uint64_t patience = (uint64_t)(budget * 1e9);
    int ready = 0, before = 0;
    for (Py_ssize_t i = 0; i < rings; i++)
        ring_at(self, i)->pins++;
    Py_BEGIN_ALLOW_THREADS
    uint64_t now = now_ns(), end = now + patience;
    do {
        sched_yield();
        ready = count_ready(self, rings);
        if (ready >= wanted)
            break;
        now = now_ns();
        if (ready > before) {
            before = ready;
            end = now + patience;
        }
    } while (now < end);
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < rings; i++)
        ring_at(self, i)->pins--;
    return PyLong_FromLong(ready);
}

enum { GENERATION, EXPIRED, SILENT, VALUES, USED, HELD, READ_NAMES, CALL = READ_NAMES, REPLY_RANK, FINISH, NAMES };
static PyObject *attribute_names[NAMES];

/* Return what a call ends with whose last value this is: all, or the one that was asked for. */
static PyObject *asked_of(PyObject *gather, PyObject *values)
{
    PyObject *call = PyObject_GetAttr(gather, attribute_names[CALL]);
    PyObject *rank = call ? PyObject_GetAttr(call, attribute_names[REPLY_RANK]) : NULL;
    PyObject *asked = NULL;
    if (rank)
        asked = rank == Py_None ? Py_NewRef(values) : PyObject_GetItem(values, rank);
    Py_XDECREF(call);
    Py_XDECREF(rank);
    return asked;
}

/* Enter a plain value, or none, into the gather of its call, as CallTable.acknowledge does. Return
 * whether that was done; nothing was done otherwise. With the last value the call is no longer among
 * `gathers`, and `ends` is what it is to be finished with.
 */
static int enter(PyObject *gathers, PyObject *gather, PyObject *call_id, PyObject *rank,
                 const Header *header, const char *data, PyObject **ends)
{
    PyObject *found[READ_NAMES] = {NULL}, *value = NULL;
    uint64_t size = header->size - header->named;
    int entered = 0;
    for (int i = 0; i < READ_NAMES; i++)
        if (!(found[i] = PyObject_GetAttr(gather, attribute_names[i])))
            goto done;
    PyObject *silent = found[SILENT], *values = found[VALUES], *used = found[USED];
    Py_ssize_t index = PyLong_AsSsize_t(rank);
    if (PyLong_AsUnsignedLong(found[GENERATION]) != header->generation || found[EXPIRED] != Py_False ||
        found[HELD] != Py_None || !PySet_CheckExact(silent) || PySet_Contains(silent, rank) != 1 ||
        !PyList_CheckExact(values) || index >= PyList_GET_SIZE(values) || !PyList_CheckExact(used))
        goto done;
    if (header->kind == NOTHING)
        value = Py_NewRef(Py_None);
    else if (size && (unsigned char)*data != PICKLED)
        value = PyMarshal_ReadObjectFromString(data, (Py_ssize_t)size);
    if (!value || PyList_Append(used, rank) < 0)
        goto done;
    PyList_SetItem(values, index, Py_NewRef(value));
    entered = 1;
    if (PySet_Discard(silent, rank) == 1 && PySet_GET_SIZE(silent) == 0) {
        *ends = asked_of(gather, values); /* of no effect if an error has ended it */
        if (PyDict_DelItem(gathers, call_id) < 0)
            PyErr_Clear();
    }
done:
    for (int i = 0; i < READ_NAMES; i++)
        Py_XDECREF(found[i]);
    Py_XDECREF(value);
    if (!entered)
        PyErr_Clear(); /* whoever takes the message the long way says what is wrong */
    return entered;
}

/* Call deliver(call id, rank, generation, data, None) for each value that lies in line, data being
 * None for none, save those that were entered into the gathers of the second argument (call id ->
 * gather, or None); return the first ring, by number, whose next message is another, or -1.
 */
static PyObject *rings_collect(Rings *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "collect takes 2 arguments, not %zd", count);
    if (!rings_open(self))
        return NULL;
    PyObject *deliver = args[0], *gathers = PyDict_CheckExact(args[1]) ? args[1] : NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->readers); i++) {
        Ring *ring = ring_at(self, i);
        while (ring->base && load(&ring->words[HEAD]) != ring->tail) {
            Header header;
            char *at;
            if (!next_inline(ring, &header, &at) || header.kind < NOTHING || header.kind > VALUE)
                return PyLong_FromSsize_t(i);
            PyObject *given[6] = {NULL,
                                  PyLong_FromUnsignedLongLong(header.call_id),
                                  PyLong_FromSsize_t(i),
                                  PyLong_FromUnsignedLong(header.generation),
                                  NULL,
                                  Py_None};
            PyObject *gather = NULL;
            if (gathers && given[1] && given[2])
                gather = Py_XNewRef(PyDict_GetItemWithError(gathers, given[1]));
            PyObject *ends = NULL;
            if (gather && enter(gathers, gather, given[1], given[2], &header, at + header.named, &ends)) {
                int failed = PyErr_Occurred() || advance(ring, &header) < 0;
                if (ends && !failed) { /* callbacks run here */
                    PyObject *done = PyObject_CallMethodOneArg(gather, attribute_names[FINISH], ends);
                    failed = !done;
                    Py_XDECREF(done);
                }
                Py_XDECREF(ends);
                Py_DECREF(gather);
                for (int part = 1; part < 4; part++)
                    Py_XDECREF(given[part]);
                if (failed)
                    return NULL;
                continue;
            }
            Py_XDECREF(gather);
            given[4] = header.kind == NOTHING
                           ? Py_NewRef(Py_None)
                           : PyBytes_FromStringAndSize(at + header.named, header.size - header.named);
            PyObject *done = NULL;
            if (given[1] && given[2] && given[3] && given[4] && advance(ring, &header) == 0)
                done = PyObject_Vectorcall(deliver, given + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
            for (int part = 1; part < 5; part++)
                Py_XDECREF(given[part]);
            if (!done)
                return NULL;
            Py_DECREF(done);
        }
    }
    return PyLong_FromLong(-1);
}

static int rings_traverse(Rings *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->readers);
    return 0;
}

static int rings_clear(Rings *self)
{
    Py_CLEAR(self->readers);
    return 0;
}

static void rings_dealloc(Rings *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    rings_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef rings_methods[] = {
    {"ready", (PyCFunction)rings_ready, METH_NOARGS, NULL},
    {"spin", (PyCFunction)(void (*)(void))rings_spin, METH_FASTCALL, NULL},
    {"collect", (PyCFunction)(void (*)(void))rings_collect, METH_FASTCALL, NULL},
    {NULL}};
static PyType_Slot rings_slots[] = {{Py_tp_init, rings_init},         {Py_tp_methods, rings_methods},
                                    {Py_tp_dealloc, rings_dealloc},   {Py_tp_traverse, rings_traverse},
                                    {Py_tp_clear, rings_clear},       {Py_tp_new, PyType_GenericNew},
                                    {0, NULL}};
static PyType_Spec rings_spec = {"hardpoint.rpc.shared_memory._native.ReplyRings", sizeof(Rings), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, rings_slots};

static int module_exec(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        return -1;
    PyType_Spec *specs[] = {&writer_spec, &reader_spec, &rings_spec};
    static const char *names[] = {"generation", "expired", "silent", "values",     "used",
                                  "held",       "call",    "reply_rank", "finish"};
    if (!empty_tuple && !(empty_tuple = PyTuple_New(0)))
        return -1;
    for (int i = 0; i < NAMES; i++)
        if (!attribute_names[i] && !(attribute_names[i] = PyUnicode_InternFromString(names[i])))
            return -1;
    for (int i = 0; i < 3; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (!type || PyModule_AddType(module, (PyTypeObject *)type) < 0)
            return -1;
        if (specs[i] == &reader_spec)
            Py_XSETREF(reader_type, (PyTypeObject *)Py_NewRef(type));
        Py_DECREF(type);
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_native", "The hot path of the shared-memory channel.", 0, NULL, module_slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
