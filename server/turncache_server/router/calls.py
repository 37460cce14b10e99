"""The life of one call: plan, legs, first byte, relay, end.

One object per call holds its state. The order is fixed: a prefill leg is answered before the
serving leg is sent, the engine's first byte is there before headers go to the client, and
the session advances only when the answer has ended well; but before its last bytes go out,
because the client's next call may be quicker than the end of this one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from turncache.protocol import OUTCOME_HEADER, STRIPPED_BODY_MEMBERS, Boundary
from turncache_server.control.messages import Signal, session_digest
from turncache_server.router.alone import Answered, front_of
from turncache_server.router.apis.api import Collector
from turncache_server.router.body import drop_members
from turncache_server.router.ending import Ending, Usage
from turncache_server.router.errors import SERVER_ERROR, ApiError, EngineRefused, LegFailed
from turncache_server.router.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    OutcomeKnown,
    OutcomeMissing,
)
from turncache_server.router.following import Said
from turncache_server.router.gate import Gate
from turncache_server.router.legs import ANSWER_HEADERS, TRACE_HEADERS, forwarded
from turncache_server.router.opening import (
    CallInput,
    Opened,
    Opening,
    abandon,
    finish,
    note_failure,
)
from turncache_server.router.outcomes import Asked, ask_outcome
from turncache_server.router.plan import CallPlan, EngineView
from turncache_server.router.records import CallRecord
from turncache_server.router.relay import Relay, Relayed
from turncache_server.router.services import Services
from turncache_server.router.sessions import answer_key
from turncache_server.router.signals import send_signal
from turncache_server.router.stream import ClientAnswer, ClientGone
from turncache_server.router.warming import warm_later

#: What logs and metrics call the status of a call whose client did not wait.
CLIENT_GONE: Final = 499
#: After the answer nobody waits for the outcome: the question may take this much longer.
_SETTLE_PATIENCE: Final = 10


class PlannedCall:
    """One call of a planned API.

    Args:
        services: what every call uses.
        call: the request.
        plan: its plan.
        answer: the answer to the client.
    """

    def __init__(
        self, services: Services, call: CallInput, plan: CallPlan, answer: ClientAnswer
    ) -> None:
        self._services = services
        self._call = call
        self._plan = plan
        self._answer = answer
        self._record = CallRecord(
            request=call.request,
            plan=plan.label,
            reason=plan.reason,
            tenant=call.caller.tenant,
            queued_s=call.queued_s,
        )
        self._opening = Opening(services, call, plan, self._prefilled)
        self._overhead_s: float | None = None
        self._witness: EngineView | None = None
        self._answered_by: EngineView | None = None
        self._question: asyncio.Task[Asked] | None = None
        self._ended_well: Ending | None = None
        self._streamed = False
        self._hold = services.pool.hold(view.name for view in (*plan.prefill, *plan.serve))

    async def run(self) -> web.StreamResponse:
        """Serve the call and return the answer, which has been sent."""
        services = self._services
        services.records.begin(self._record)
        call = self._call
        services.events.emit(
            CallStarted(
                request=call.request,
                api=call.api.name,
                tenant=call.caller.label,
                elapsed_s=self._since_start(),
                trace=forwarded(call.headers, TRACE_HEADERS),
                path=call.api.path,
                model=call.asked.model,
            )
        )
        code = 500
        problem: str | None = "internal"
        try:
            relayed = await self._serve()
            code, problem = relayed.code, relayed.problem
        except ClientGone:
            code, problem = self._client_left()
            return web.Response(status=code)
        except asyncio.CancelledError:
            if self._has_all or not services.switches.draining:
                code, problem = self._client_left()
                raise
            code, problem = 503, "shutdown"
            return await self._broken_off()
        finally:
            self._end(code, problem)
        return relayed.response

    @property
    def _has_all(self) -> bool:
        """Whether a stream's last event has gone out, or is about to.

        Many clients leave with it: OpenAI's reads no further than ``[DONE]``, which comes before
        the end of the body.
        """
        return self._streamed and self._ended_well is not None

    def _client_left(self) -> tuple[int, str | None]:
        """Return status and problem of a call whose client has left."""
        if not self._has_all:
            return CLIENT_GONE, "client_gone"
        self._record.ending = self._ended_well
        return 200, None

    async def _broken_off(self) -> web.StreamResponse:
        """Tell the client that the router does not wait any longer."""
        error = ApiError(
            503,
            "The router is shutting down and broke off the call. Try again.",
            kind=SERVER_ERROR,
            code="draining",
            retry_after_s=self._services.config.retry_after_s,
        )
        try:
            return await self._answer.fail(error)
        except ClientGone:
            return web.Response(status=CLIENT_GONE)

    async def _serve(self) -> Relayed:
        config = self._services.config
        opened: Opened | None = None
        try:
            if config.ping_s and self._call.asked.stream:
                async with self._answer.pinged(config.ping_s):
                    opened = await self._opening.run()
            else:
                opened = await self._opening.run()
            return await self._relay(opened)
        except EngineRefused as refusal:
            return await self._refuse(refusal)
        except LegFailed as failure:
            if failure.refusal is not None:
                return await self._refuse(failure.refusal)
            error = failure.to_api_error(config.retry_after_s)
            response = await self._answer.fail(error)
            return Relayed(response=response, code=error.status, problem=failure.kind)
        except (ClientGone, asyncio.CancelledError):
            if opened is not None:
                if self._has_all:
                    finish(self._services, opened.leg)
                else:
                    self._opening.left(abandon(self._services, opened.leg))
                opened = None
            raise
        finally:
            if opened is not None:
                opened.leg.close()

    async def _relay(self, opened: Opened) -> Relayed:
        self._witness = self._witness or opened.engine
        self._answered_by = opened.engine
        headers = opened.leg.headers(ANSWER_HEADERS) | await self._outcome_header()
        self._record.ttft_s = self._since_start()
        waited_s = self._call.queued_s + self._opening.held_back_s
        self._overhead_s = self._record.ttft_s - self._opening.engine_s - waited_s
        collector = self._call.api.collector(self._call.asked.num_choices, self._call.tags.final)
        relay = Relay(
            answer=self._answer,
            opened=opened,
            headers=headers,
            collector=collector,
            config=self._services.config,
            completed=lambda ending: self._completed(opened.engine, collector, ending),
        )
        # By what the engine sent, and once pings are out by what the client was promised.
        self._streamed = opened.leg.content_type == "text/event-stream" or self._answer.started
        relayed = await (relay.stream() if self._streamed else relay.whole())
        self._record.ending = relayed.ending
        if relayed.failure is not None:
            note_failure(
                self._services, self._call.request, opened.engine, relayed.failure, retried=False
            )
        return relayed

    async def _refuse(self, refusal: EngineRefused) -> Relayed:
        """Pass an engine's error on."""
        if self._answer.started:
            response = await self._answer.fail(refusal.to_api_error())
        else:
            headers = dict(refusal.headers)
            if refusal.status == 503:
                headers.setdefault("retry-after", str(self._services.config.retry_after_s))
            body = drop_members(refusal.body, STRIPPED_BODY_MEMBERS)
            response = await self._answer.whole(refusal.status, headers, body)
        return Relayed(response=response, code=refusal.status, problem="engine_error")

    def _completed(self, engine: EngineView, collector: Collector, ending: Ending) -> None:
        answered = None
        if self._call.history is not None:
            said = collector.said()
            digest = self._call.history.with_answer(said)
            if self._call.followed:
                self._services.conversations.answered(digest, self._call.tags.session_id)
            if self._services.config.may_decode_alone:
                answered = self._answered(digest, said, ending)
        self._advance(engine, ending, answered, collector)
        self._ended_well = ending

    def _answered(self, digest: bytes, said: Said, ending: Ending) -> Answered | None:
        """Return what the next call may be served by decode alone for, None when unknown."""
        told = ending.usage or self._record.outcome
        if told is None:
            return None
        return Answered(
            digest=digest,
            front=front_of(self._call.body),
            prompt_tokens=told.prompt_tokens if isinstance(told, Usage) else told.prompt,
            answer_bytes=said.num_bytes,
        )

    def _advance(
        self, engine: EngineView, ending: Ending, answered: Answered | None, collector: Collector
    ) -> None:
        tags, services = self._call.tags, self._services
        if ending.answer_id is not None and self._call.body.get("store") is not False:
            services.sessions.advance(
                answer_key(ending.answer_id, self._call.caller.tenant),
                served_by=engine.name,
                root=self._call.root,
            )
        if tags.final:
            self._leave(services.sessions.forget(tags.session_id), engine)
            services.next_prompts.drop(tags.session_id)
            services.forecast.forget(tags.session_id)
        elif not self._call.anonymous:
            left = services.sessions.advance(
                tags.session_id,
                served_by=engine.name,
                root=self._call.root,
                answered=answered,
                num_answers=self._call.asked.num_answers,
            )
            self._leave(left, engine)
            if ending.boundary is Boundary.TOOL:
                self._begin_wait(engine, ending.tool_names, collector)

    def _leave(self, left: str | None, engine: EngineView) -> None:
        """Tell the engine that a session has come from that it is kept there in vain.

        Whoever drains it, now or later, must not wait for this session.
        """
        if left is not None and left != engine.name:
            taken = Signal(session=self._call.tags.session_id, kind="final")
            self._services.background.spawn(self._signal([left], taken), "leave a session")

    def _begin_wait(
        self, engine: EngineView, tool_names: tuple[str, ...], collector: Collector
    ) -> None:
        """Tell the engines that hold the session when it will be back, if anybody knows."""
        tags, services = self._call.tags, self._services
        expect_s = services.forecast.begins(
            tags.session_id,
            tool_names,
            tags.tools,
            tenant=self._call.caller.label,
            num_answers=self._call.asked.num_answers,
            now_s=services.clock(),
        )
        if expect_s is None:
            return
        names = {view.name for view in (engine, self._witness) if view is not None}
        signal = Signal(session=tags.session_id, kind="wait", expect_s=expect_s)
        services.background.spawn(self._signal(sorted(names), signal), "signal a wait")
        if services.config.warm_ahead_s and self._plan.prefill and self._call.return_enabled:
            assert self._witness is not None, "its leg has been answered"
            warm_later(
                services,
                self._call,
                collector.said(),
                prefill=self._witness,
                source=engine,
                expect_s=expect_s,
            )

    async def _signal(self, names: list[str], signal: Signal) -> None:
        await send_signal(self._services, names, signal)

    # --- the outcome ----------------------------------------------------------------------

    def _prefilled(self, engine: EngineView) -> None:
        """Ask for the outcome while decode works: it costs the call no time."""
        self._witness = engine
        # When the leg was repeated, nothing counts that was heard of the one before.
        self._record.final = False
        if self._question is not None:
            self._question.cancel()
            self._question = None
        if not self._can_ask:
            return
        self._question = asyncio.create_task(self._ask(self._services.config.control_timeout_s))

    @property
    def _can_ask(self) -> bool:
        """Whether an engine that knows the outcome can be asked for it."""
        witness = self._witness
        return witness is not None and self._services.pool.control_of(witness.name) is not None

    async def _ask(self, timeout_s: float) -> Asked:
        assert self._witness is not None
        address = self._services.pool.control_of(self._witness.name)
        if address is None:
            return Asked()
        return await ask_outcome(
            self._services.control,
            address,
            self._call.request,
            self._plan,
            timeout_s=timeout_s,
        )

    async def _outcome_header(self) -> dict[str, str]:
        question, self._question = self._question, None
        if question is None:
            asked = await self._ask(self._services.config.control_timeout_s)
        else:
            asked = await question
        self._note(asked)
        if asked.why is not None:
            self._services.events.emit(
                OutcomeMissing(request=self._call.request, why=asked.why, detail=asked.detail)
            )
        if asked.outcome is None:
            return {}
        return {OUTCOME_HEADER: asked.outcome.to_header()}

    def _note(self, asked: Asked) -> None:
        if asked.outcome is not None:
            self._record.outcome = asked.outcome
            self._record.final = asked.done

    async def _settle(self) -> None:
        """Ask once more after the call: the counts of its admission may have changed."""
        try:
            if not self._record.final:
                limit_s = _SETTLE_PATIENCE * self._services.config.control_timeout_s
                self._note(await self._ask(limit_s))
            self._tell_outcome()
        finally:
            self._settled()

    def _tell_outcome(self) -> None:
        if self._record.outcome is not None:
            call = self._call
            compared = self._services.config.warm_ahead_s and call.asked.brings_results
            self._services.events.emit(
                OutcomeKnown(
                    request=call.request,
                    outcome=self._record.outcome,
                    warmed=call.warmed if compared and self._plan.prefill else None,
                    ttft_s=self._record.ttft_s,
                )
            )

    def _settled(self) -> None:
        self._record.final = True
        self._hold.release()
        self._services.events.emit(CallSettled(request=self._call.request))

    # --- the end --------------------------------------------------------------------------

    def _since_start(self) -> float:
        return self._services.clock() - self._call.started_s

    def _end(self, code: int, problem: str | None) -> None:
        record, ending = self._record, self._record.ending
        self._opening.close()
        if self._services.pressure is not None:
            self._services.pressure.over(self._call.request)
        record.prefill_s = self._opening.prefill_s
        record.held_back_s = self._opening.held_back_s
        record.repeats = self._opening.num_repeats
        record.total_s = self._since_start()
        record.state = {None: "done", "client_gone": "cancelled"}.get(problem, "failed")
        if self._question is not None:
            self._question.cancel()
        usage = None if ending is None else ending.usage
        served = dict.fromkeys(view.name for view in (self._witness, self._answered_by) if view)
        self._services.events.emit(
            CallEnded(
                request=self._call.request,
                session=session_digest(self._call.tags.session_id),
                api=self._call.api.name,
                plan=self._plan.label,
                reason=self._plan.reason,
                code=code,
                problem=problem,
                boundary=None if ending is None else ending.boundary,
                tool_names=() if ending is None else ending.tool_names,
                prefill_s=record.prefill_s,
                ttft_s=record.ttft_s,
                total_s=record.total_s,
                overhead_s=self._overhead_s,
                queued_s=self._call.queued_s,
                tenant=self._call.caller.label,
                engines=tuple(served),
                finish_reason=None if ending is None else ending.finish_reason,
                prompt_tokens=None if usage is None else usage.prompt_tokens,
                answer_tokens=None if usage is None else usage.completion_tokens,
                held_back_s=record.held_back_s,
                repeats=record.repeats,
            )
        )
        if self._services.gate is not None:
            self._leave_gate(self._services.gate)
        if record.final or not self._can_ask:
            self._tell_outcome()
            self._settled()
        else:
            self._services.background.spawn(self._settle(), "settle a call")

    def _leave_gate(self, gate: Gate) -> None:
        """Say how large the session is now, and whether it will be back."""
        # Also when the client has left with the last event and before the end of its stream.
        outcome, ending = self._record.outcome, self._ended_well
        usage = None if ending is None else ending.usage
        tokens = None if outcome is None else outcome.prompt
        if usage is not None:
            tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
        gate.ended(
            self._call.request,
            well=ending is not None,
            tokens=tokens,
            # What is found of a session that has not called yet is mostly others' as well.
            shared=None if outcome is None or self._call.continues else outcome.reused,
            final=self._call.tags.final,
        )
