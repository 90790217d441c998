"""Processes that share the work on blocks with a run, seen from that run: its own, and those of helpers elsewhere.

Each walks through the model on its own device and takes the next free block (`WorkFolder.lock_block`). All write to the
same work folder, from which any run can be resumed: what a process that failed has not finished is done by the run
itself. A block has the same result in each of them, so that the result does not depend on who did what.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

import torch

from rocket_core.pipeline.context import Run
from rocket_core.pipeline.devices.messages import ANSWER, Begin, Finished, Offer, Ready, Request
from rocket_core.pipeline.devices.offers import Offers
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.system.child_process import ChildError, ChildProcess, Failed

_LOOK_SECONDS = 0.1


@dataclass(kw_only=True, slots=True)
class _Member:
    """A process.

    Attributes:
        device: its device.
        process: the process.
        is_ready: whether it has answered the first request.
        unanswered: number of requests for blocks that it has not answered.
    """

    device: torch.device
    process: ChildProcess
    is_ready: bool = False
    unanswered: int = 0


PROGRAM = "rocket_core.pipeline.devices.process"
"""Module that the processes run."""


class DeviceProcesses:
    """The processes of a run's further devices, as a context; none of them is left after it.

    Meanwhile other processes may help as well; see `offers`.

    Args:
        run: the run.
        work: its work folder, which this process has claimed.
    """

    def __init__(self, run: Run, work: WorkFolder) -> None:
        self._run = run
        self._work = work
        self._offers = Offers(work)
        self._members: list[_Member] = []

    def __enter__(self) -> "DeviceProcesses":
        # They import the library and read the model meanwhile.
        for device in self._run.others:
            member = _Member(device=device, process=ChildProcess(PROGRAM, {}))
            self._members.append(member)
            # Should it fail, the first request tells.
            with suppress(ChildError):
                member.process.send(self._begin(device).model_dump_json().encode())
        self._offers.publish(self._offer(None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._offers.withdraw()
        for member in self._members:
            member.process.close()

    @contextmanager
    def working(self, request: Request, monitor: Monitor, is_complete: Callable[[], bool]) -> Iterator[None]:
        """Let all processes work on blocks while the context is active, and until they find none that is left.

        A process that fails does not take part any more; the observer is warned.

        Args:
            request: what to do.
            monitor: charged with their devices; asked whether to continue while they finish.
            is_complete: whether all blocks are finished, so that a process that is still starting is not waited for.
        """
        began = time.monotonic()
        self._offers.publish(self._offer(request))
        message = request.model_dump_json().encode()
        for member in tuple(self._members):
            with self._leaving_out(member, monitor):
                member.process.send(message)
                member.unanswered += 1
        yield
        for member in tuple(self._members):
            with self._leaving_out(member, monitor):
                _collect_answers(member, monitor, is_complete)
        self._offers.publish(self._offer(None))
        # Its last block should not take a helper longer than all of them together have taken.
        self._offers.wait(monitor.pulse, most=time.monotonic() - began)
        for cost in self._offers.take_costs():
            monitor.costs.add_process(cost)

    @contextmanager
    def _leaving_out(self, member: _Member, monitor: Monitor) -> Iterator[None]:
        try:
            yield
        except ChildError as error:
            self._members.remove(member)
            member.process.close()
            monitor.observer.on_warning(
                f"{member.device} takes no part any more, and {self._run.device} does what it has not finished: {error}"
            )

    def _offer(self, request: Request | None) -> Offer:
        return Offer(config=self._run.config, threads=torch.get_num_threads(), request=request)

    def _begin(self, device: torch.device) -> Begin:
        source = self._run.source
        return Begin(
            name=source.name,
            folder=source.folder,
            commit=source.commit,
            config=self._run.config.model_copy(update={"device": str(device)}),
            work=self._work.path.absolute(),
            threads=torch.get_num_threads(),
        )


def _collect_answers(member: _Member, monitor: Monitor, is_complete: Callable[[], bool]) -> None:
    """Wait until a process has answered all requests, or nothing is left to do and it is still starting."""
    while member.unanswered:
        while not member.process.poll(_LOOK_SECONDS):
            monitor.pulse()
            if not member.is_ready and is_complete():
                return
        match ANSWER.validate_json(member.process.receive()):
            case Failed(reason=reason):
                raise ChildError(reason)
            case Ready():
                member.is_ready = True
            case Finished(cost=cost):
                member.unanswered -= 1
                if not member.unanswered:
                    monitor.costs.add_process(cost)
