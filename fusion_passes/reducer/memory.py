"""The memory of a module's buckets, and the ``.grad`` of the parameters that alias it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fusion_passes.layout.layout import Bucket, BucketIndex, Layout, ParameterNumber, Piece
from fusion_passes.reducer.errors import Refuse, misplaced, wrong_layout
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.registered import RegisteredBuckets
from fusion_passes.torch_private.autograd import tensor_in


class BucketMemory:
    """The memory of the buckets of one iteration. A bucket is allocated when its first gradient is
    stored; after the iteration, only the gradients that alias it keep it.

    Attributes:
        registered: the buckets' memory that NCCL has registered; ``None`` if each iteration
            allocates memory.
        existing: the ``.grad`` that a parameter had before the backward, by number.
        seen: parameters whose ``.grad`` has been looked at in this backward; :meth:`alias` leaves
            that of others alone. A graph that stores a gradient looks at it
            (``CompiledForward.give_memory``): a look at all parameters takes as long as the rest of
            a small step.
        sparse: the sparse gradients, by number.
        rounded: parameters whose gradient was of a wider dtype than its bucket, and was rounded.
    """

    def __init__(
        self,
        parameters: Parameters,
        label: str,
        registered: RegisteredBuckets | None,
        refuse: Refuse,
    ) -> None:
        self.registered = registered
        self.existing: dict[ParameterNumber, Tensor] = {}
        self.seen: set[ParameterNumber] = set()
        self.sparse: dict[ParameterNumber, Tensor] = {}
        self.rounded: set[ParameterNumber] = set()
        self._parameters = parameters
        self._label = label
        self._refuse = refuse
        self._layout = Layout((), {})
        self._allocated: dict[BucketIndex, Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._addresses: dict[BucketIndex, list[int]] = {}
        devices = {kind.device for kind in parameters.kinds.values()}
        self._accelerators = [device for device in devices if device.type != "cpu"]

    def begin(self, layout: Layout) -> None:
        """Begin an iteration with this layout."""
        self.end()
        if layout is not self._layout:
            self._layout = layout
            self._addresses.clear()

    def end(self) -> None:
        """Forget the memory, which the gradients in it keep."""
        self.existing.clear()
        self.seen.clear()
        self.sparse.clear()
        self._allocated = {}
        self._streams.clear()

    def of(self, bucket: Bucket) -> Tensor:
        """The memory of a bucket, ``[bucket.numel]``."""
        memory = self._allocated.get(bucket.index)
        if memory is None:
            memory = self.registered.of(bucket) if self.registered is not None else None
            if memory is None:
                memory = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            else:  # Gradients of earlier iterations, which accumulate further, may lie there.
                self._move_out(bucket, memory)
            self._allocated[bucket.index] = memory
        return memory

    def place(self, number: ParameterNumber) -> Tensor:
        """The place of a gradient in its bucket, in the parameter's shape. Autograd does not see it
        as a view: ``.grad.detach_()``, which programs call before ``.grad.zero_()``, fails on a
        view."""
        index, offset = self._layout.places[number]
        memory = self.of(self._layout.buckets[index])
        shape, strides = self._parameters.all[number].shape, self._parameters.strides[number]
        return tensor_in(memory, shape, strides, offset)

    def join_streams(self) -> None:
        """Have the current stream wait for the streams that stored gradients in this iteration.
        Autograd runs a node on the stream of its forward, so gradients of one bucket may come from
        several streams. The callback that finalizes runs on the stream that called the backward."""
        for device in self._accelerators:
            current, last = torch.accelerator.current_stream(device), self._streams.get(device)
            self._streams[device] = current
            if last is None or last == current:
                continue
            current.wait_stream(last)
            for memory in self._allocated.values():
                if memory.device == device:
                    memory.record_stream(current)

    # --- Gradients into buckets ------------------------------------------------------------------

    def note_existing(self, numbers: Collection[ParameterNumber]) -> None:
        """Record which of these parameters have a ``.grad``. It may have gone since an earlier
        backward of the iteration, or have come from it."""
        self.seen.update(numbers)
        if self.existing:
            for number in numbers:
                self.existing.pop(number, None)
        gradients = self._gradients(numbers)
        if gradients.count(None) < len(gradients):
            found = zip(numbers, gradients, strict=True)
            self.existing |= {number: each for number, each in found if each is not None}

    def _gradients(self, numbers: Collection[ParameterNumber]) -> list[Tensor | None]:
        """The ``.grad`` of each of these parameters."""
        parameters = self._parameters.all
        return [parameters[number].grad for number in numbers]

    def add_existing(self, numbers: Collection[ParameterNumber]) -> None:
        """Add the existing ``.grad`` of these parameters to their stored gradients: the all-reduce
        averages both."""
        existing = [n for n in numbers if n in self.existing] if self.existing else ()
        if existing:
            places = [self.place(number) for number in existing]
            torch._foreach_add_(places, [self.existing[n].detach() for n in existing])

    def copy_in(self, number: ParameterNumber, *, lets_alias: bool) -> None:
        """Copy ``.grad`` into the bucket, or zeros if there is none. Let ``.grad`` alias the bucket
        then, if ``lets_alias``: see :meth:`alias`."""
        gradient = self._parameters.all[number].grad
        if self._parameters.kinds[number].is_sparse:
            if gradient is not None:
                self.sparse[number] = gradient
            return
        place = self.place(number)
        if gradient is None:
            place.zero_()
            return
        if gradient.layout is not torch.strided:
            name = self._parameters.names[number]
            self._refuse(wrong_layout(name, self._label, gradient.layout))
        self._note_rounded(number, gradient.dtype)
        place.copy_(gradient.detach() if gradient.requires_grad else gradient)
        if lets_alias:
            self._alias(number, place)

    def copy_flat(self, numbers: Piece, gradients: Sequence[Tensor]) -> None:
        """Copy gradients, ``[numel]`` each and of one dtype, into the bucket."""
        places = []
        for number in numbers:
            index, offset = self._layout.places[number]
            memory = self.of(self._layout.buckets[index])
            places.append(memory[offset : offset + self._parameters.kinds[number].numel])
            self._note_rounded(number, gradients[0].dtype)
        with torch.no_grad():
            torch._foreach_copy_(places, list(gradients))

    def _note_rounded(self, number: ParameterNumber, dtype: torch.dtype) -> None:
        sent_as = self._parameters.kinds[number].dtype
        if dtype != sent_as and torch.promote_types(dtype, sent_as) != sent_as:
            self.rounded.add(number)

    def sparse_gradient(self, number: ParameterNumber) -> Tensor:
        """The sparse gradient of a parameter on this rank; one without rows if there is none."""
        gradient = self.sparse.get(number)
        if gradient is not None:
            return gradient.detach()
        parameter = self._parameters.all[number]
        size = tuple(parameter.shape)
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *size[1:]), dtype=parameter.dtype, device=parameter.device)
        return torch.sparse_coo_tensor(indices, values, size)

    # --- Gradients that alias buckets ------------------------------------------------------------

    def alias(self, number: ParameterNumber) -> None:
        """Let ``.grad`` be the bucket view, if the gradient is new in this iteration, which frees
        the memory that it had. It is left alone if its strides differ from those of the bucket
        view, because the parameter's strides changed after DDP was constructed: an optimizer may
        iterate over both by address."""
        self._alias(number, self.place(number))

    def _alias(self, number: ParameterNumber, place: Tensor) -> None:
        parameter = self._parameters.all[number]
        gradient = parameter.grad
        is_plain = (
            type(gradient) is Tensor
            and not gradient.requires_grad
            and gradient.dtype == self._parameters.kinds[number].dtype
            and _same_strides(gradient, self._parameters.strides[number])
        )
        if is_plain and number not in self.existing and number in self.seen:
            parameter.grad = place

    def give_back(
        self,
        bucket: Bucket,
        used: Collection[ParameterNumber] | None,
        elsewhere: frozenset[ParameterNumber],
    ) -> None:
        """Leave the averages of a bucket in ``.grad``, as eager DDP does. A new gradient aliases
        the bucket already: autograd kept the view that the graph returned, or :meth:`alias` set it.
        The average is copied into a ``.grad`` that existed before the backward. If this rank has no
        gradient, ``.grad`` becomes the bucket view. Parameters that no rank used (``used``: those
        that some rank has used; ``None``: all) keep their ``.grad``. It becomes ``None`` if another
        rank keeps the average (``elsewhere``)."""
        memory, parameters = self._allocated.get(bucket.index), self._parameters.all
        if bucket.is_sparse:
            for number in bucket.numbers:
                if used is None or number in used:
                    parameters[number].grad = self.sparse[number]
        elif memory is not None:  # Else it is empty.
            for number in elsewhere.intersection(bucket.numbers) if elsewhere else ():
                if used is None or number in used:
                    parameters[number].grad = None
            gradients = self._gradients(bucket.numbers)
            begin, size = memory.data_ptr(), memory.itemsize
            places = self._addresses.get(bucket.index)
            if places is None or places[0] != begin:  # Mostly it has the memory of the last step.
                places = [begin + offset * size for offset in bucket.offsets]
                self._addresses[bucket.index] = places
            found = [None if gradient is None else gradient.data_ptr() for gradient in gradients]
            if found != places:
                each = zip(bucket.numbers, gradients, found, places, strict=True)
                left = [(n, g) for n, g, at, place in each if at != place and n not in elsewhere]
                self._copy_back(left, used, range(begin, begin + memory.nbytes))

    def _copy_back(
        self,
        gradients: Sequence[tuple[ParameterNumber, Tensor | None]],
        used: Collection[ParameterNumber] | None,
        addresses: range,
    ) -> None:
        """Copy averages out of a bucket, which has these addresses."""
        copies, averages = [], []
        for number, gradient in gradients:
            if used is not None and number not in used:
                continue
            if gradient is None:
                self._parameters.all[number].grad = self.place(number)
            elif gradient.data_ptr() in addresses:
                self._refuse(misplaced(self._parameters.names[number], self._label))
            else:
                copies.append(gradient)
                averages.append(self.place(number))
        if copies:
            with torch.no_grad():  # With create_graph=True, gradients require one.
                torch._foreach_copy_(copies, averages)

    def allocated(self) -> list[Bucket]:
        """The buckets that have been allocated in this iteration."""
        return [self._layout.buckets[index] for index in self._allocated]

    def un_alias(self, bucket: Bucket) -> None:
        """Move gradients out of a bucket, into memory of their own."""
        self._move_out(bucket, self._allocated[bucket.index])

    def un_alias_or_drop(self, bucket: Bucket) -> None:
        """As :meth:`un_alias`, and as :meth:`drop` if no memory is left."""
        try:
            self.un_alias(bucket)
        except RuntimeError:
            self.drop(bucket.numbers, bucket)

    def _move_out(self, bucket: Bucket, memory: Tensor) -> None:
        for parameter in self._in_bucket(bucket.numbers, memory):
            assert parameter.grad is not None, "it lies there"
            parameter.grad.data = parameter.grad.clone()

    def drop(self, numbers: Iterable[ParameterNumber], bucket: Bucket) -> None:
        """Set ``.grad`` of these parameters to ``None`` if it lies in a bucket."""
        for parameter in self._in_bucket(numbers, self._allocated[bucket.index]):
            parameter.grad = None

    def _in_bucket(
        self, numbers: Iterable[ParameterNumber], memory: Tensor
    ) -> Iterator[nn.Parameter]:
        """Find the parameters whose gradients lie in a bucket's memory."""
        addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        for number in numbers:
            parameter = self._parameters.all[number]
            gradient = parameter.grad
            if gradient is None or type(gradient) is not Tensor:
                continue
            if gradient.layout is torch.strided and gradient.data_ptr() in addresses:
                yield parameter

    def release(self) -> None:
        """Give up the registered memory: no bucket is launched any more."""
        if self.registered is not None:
            self.registered.release()


def _same_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    if tensor.stride() == strides:
        return True
    sizes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or own == other for size, own, other in sizes)
