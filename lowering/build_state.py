"""Adds what surrounds the compute ops: entry, gradient synchronisation, update, prefetch, reductions and results."""

from __future__ import annotations

import dataclasses

from ratrain_jax.lowering.build_update import UpdateTasks
from ratrain_jax.lowering.program import (
    GlobalReduce,
    GradSync,
    Kind,
    Metrics,
    Prologue,
    SendActivation,
    SendGradient,
    UpdateShard,
)
from ratrain_jax.lowering.sheet import COMPUTE, RESULT, SYNC, TRANSFER, Sheet


class StateTasks:
    """Adds the life of a step's state around its compute ops.

    Attributes:
        sheet: the growing program.
        updates: adds the updates.
        arguments: batch leaves, by (leaf, stage).
    """

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.code = sheet.code
        self.updates = UpdateTasks(sheet)
        self.arguments: dict[tuple[int, int], int] = {}
        # With late syncs, the sync of each (stage, microbatch) that reads what its last backward makes.
        self._first_syncs: dict[tuple[int, int], int] = {}

    def enter(self) -> None:
        """What exists when the step starts, the views, and the operands."""
        sheet, values = self.sheet, self.sheet.values
        for stage in range(self.code.stages):
            if self.code.update.replicated:
                sheet.replicated[stage] = self._input(values.replicated(stage))
        for n in self.updates.stateful:
            parameters = self._input(values.parameters(n))
            if not sheet.settings.trains:
                sheet.outputs.append(parameters)  # the state stays as it is
                self.updates.gather(n, parameters, sheet.views, opens=False)
                continue
            optimizer = self._input(values.optimizer(n))
            sheet.state[n] = (parameters, optimizer)
        for n in sheet.state:
            if sheet.settings.update_prefetch:
                for stage in self.updates.homes(n):
                    sheet.views[stage, n] = self._input(values.view(n, stage))
            else:
                self.updates.gather(n, sheet.state[n][0], sheet.views, opens=False)
        self._operands()

    def _input(self, value: int) -> int:
        self.sheet.inputs.append(value)
        return value

    def _operands(self) -> None:
        """Operands of the loss where they are read: handed in, or made by the prologue and sent."""
        sheet, code = self.sheet, self.code
        readers: dict[int, set[int]] = {}
        for n, layer in enumerate(code.layered.layers):
            for o in layer.operands:
                readers.setdefault(o, set()).add(code.stage_of[n])
        computed = set(code.prologue_operands)
        for o, stages in sorted(readers.items()):
            if o not in computed:
                for stage in sorted(stages):
                    sheet.operands[o, stage] = self._input(self._operand(o, stage))
        if not computed:
            return
        made = [self._operand(o, 0) for o in code.prologue_operands]
        reads = [sheet.replicated[0]] if 0 in sheet.replicated else []
        reads += [self._argument(leaf, 0) for leaf in code.prologue_arguments]
        seconds = sheet.durations.sweep(sum(sheet.bytes(v) for v in made))
        sheet.add(Prologue(0, tuple(reads), tuple(made)), seconds, (COMPUTE,))
        for o, value in zip(code.prologue_operands, made, strict=True):
            sheet.operands[o, 0] = value
            for stage in sorted(readers.get(o, set()) - {0}):
                copy = sheet.values.copy(value, stage)
                sheet.operands[o, stage] = copy
                op = SendActivation(0, (value,), (copy,), target=stage)
                sheet.add(op, sheet.durations.send(sheet.bytes(copy), stage), (TRANSFER, -1))

    def _operand(self, number: int, stage: int) -> int:
        operand = self.code.regions.operands[number]
        arrays = [self.code.operand_type(number)]
        return self.sheet.values.new(Kind.OPERAND, operand.name, arrays, stage)

    def _argument(self, leaf: int, stage: int) -> int:
        if (leaf, stage) not in self.arguments:
            self.arguments[leaf, stage] = self._input(self.sheet.values.argument(leaf, stage))
        return self.arguments[leaf, stage]

    def leave(self) -> None:
        """Everything from the gradients on; of a step that evaluates, its results."""
        updated = self.updates.stateful if self.sheet.settings.trains else []
        for n in updated:
            self._sync(n)
        if self.code.zero == 2:
            for n in updated:
                self._join_shares(n)
        for phase in range(len(self.sheet.reductions) + 1):
            if phase > 0:
                self._reduce(phase)
            for n in updated:
                if phase <= self.code.update.layers[n].phase:
                    self.updates.update(n, phase)
        if self.sheet.settings.trains:
            self._replicated()
        self._metrics()

    def _sync(self, layer: int) -> None:
        """Makes a layer's gradient final: over microbatches, over borrowers, over the group."""
        if self.code.zero == 1:
            self._sync_whole(layer)
        else:
            self._sync_each(layer)

    def _gate(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """What a sync waits for beside its gradient, if it may not overlap with backward.

        It stands behind the stage's last backward, and behind the sync of the stage's first layer: that one reads what
        the last backward makes, so that the link lane does not reach the others before.
        """
        if self.sheet.settings.layerwise_state:
            return ()
        first = self._first_syncs.get((stage, microbatch))
        gate = (self.sheet.last_backward[stage, microbatch],)
        return gate if first is None else (*gate, first)

    def _place(self, stage: int, layer: int) -> int:
        """The place of a layer's sync among its stage's: as gradients become final, or the last of them first."""
        if self.sheet.settings.layerwise_state:
            return -layer
        at_home = self.code.stage_of[layer] == stage
        return layer if at_home else len(self.code.layered.layers) + layer

    def _sync_whole(self, layer: int) -> None:
        sheet, home = self.sheet, self.code.stage_of[layer]
        own = sheet.accumulators[home, layer]
        shares = [self._share(layer, s) for s in self.code.borrowers(layer)]
        gradient = sheet.values.gradient(layer, home)
        op = GradSync(home, (own, *shares), (gradient,), (own, *shares), layer=layer)
        seconds = sheet.durations.collective(sheet.bytes(own))
        last = self.code.microbatches - 1
        task = self._add_sync(op, seconds, self._gate(home, last), gradient, layer)
        self._first_syncs.setdefault((home, last), task)

    def _share(self, layer: int, borrower: int) -> int:
        """Brings a borrower's share of a tied gradient to the owner."""
        sheet, home = self.sheet, self.code.stage_of[layer]
        share = sheet.accumulators[borrower, layer]
        copy = sheet.values.copy(share, home)
        op = SendGradient(borrower, (share,), (copy,), target=home)
        seconds = sheet.durations.send(sheet.bytes(share), home - borrower)
        last = self.code.microbatches - 1
        late = not sheet.settings.layerwise_state
        rank = (SYNC, *[last + 1] * late, self._place(borrower, layer))
        sheet.add(op, seconds, rank, after=self._gate(borrower, last))
        return copy

    def _sync_each(self, layer: int) -> None:
        sheet, home = self.sheet, self.code.stage_of[layer]
        borrowers = self.code.borrowers(layer)
        last = self.code.microbatches - 1
        for stage in (home, *borrowers):
            for i in range(self.code.microbatches):
                whole = sheet.microbatch_gradients[stage, layer, i]
                before = sheet.accumulators[stage, layer]
                after = sheet.values.gradient(layer, stage)
                sheet.accumulators[stage, layer] = after
                op = GradSync(
                    stage, (whole, before), (after,), (whole, before), layer=layer, microbatch=i
                )
                self._hold_back(sheet.backwards[stage, layer, i][0], before if i else None)
                seconds = sheet.durations.collective(sheet.bytes(whole))
                gate = self._gate(stage, i)
                if stage == home and i == last and not borrowers:
                    task = self._add_sync(op, seconds, gate, after, layer)
                else:
                    rank = (SYNC, i if i < last else last + 1, self._place(stage, layer))
                    task = sheet.add(op, seconds, rank, after=gate)
                if stage == home:
                    self._first_syncs.setdefault((home, i), task)

    def _hold_back(self, backward: int, synced: int | None) -> None:
        """Lets a microbatch's first backward of a layer wait until the last microbatch's gradient is synchronised.

        On a slow link whole gradients would pile up otherwise, and with them the memory that ZeRO-2 is to save.
        """
        if synced is not None:
            task = self.sheet.tasks[backward]
            op = dataclasses.replace(task.op, waits=(*task.op.waits, synced))
            self.sheet.tasks[backward] = dataclasses.replace(task, op=op)

    def _join_shares(self, layer: int) -> None:
        """Adds up the sharded accumulators of a tied layer, behind the stage's other syncs where updates are late."""
        sheet, home = self.sheet, self.code.stage_of[layer]
        borrowers = self.code.borrowers(layer)
        if not borrowers:
            return
        own = sheet.accumulators[home, layer]
        shares = [self._share(layer, s) for s in borrowers]
        gradient = sheet.values.gradient(layer, home)
        op = GradSync(home, (own, *shares), (gradient,), (own, *shares), layer=layer)
        gate = () if sheet.settings.update_prefetch else tuple(self.updates.syncs.get(home, ()))
        self._add_sync(op, sheet.durations.sweep(sheet.bytes(own)), gate, gradient, layer)
        self.updates.joined[home] = layer

    def _add_sync(
        self, op: GradSync, seconds: float, gate: tuple[int, ...], gradient: int, layer: int
    ) -> int:
        """The sync that makes a layer's gradient final; its task."""
        sheet = self.sheet
        held = sheet.bytes(gradient) + sheet.bytes(sheet.views[op.stage, layer])
        rank = (SYNC, self.code.microbatches, self._place(op.stage, layer))
        task = sheet.add(op, seconds, rank, gate, opens=self.updates.chain(layer), held=held)
        self.updates.gradients[layer] = gradient
        self.updates.syncs.setdefault(op.stage, []).append(task)
        return task

    def _reduce(self, phase: int) -> None:
        """One global reduction."""
        sheet, code = self.sheet, self.code
        info = sheet.reductions[phase - 1]
        reads = [self.updates.partials[n, phase] for n in info.layers]
        givers = {code.stage_of[n] for n in info.layers}
        if info.loss:
            for i in range(code.microbatches):
                reads += [sheet.losses[i, v] for v in code.loss_variables]
            givers |= {
                code.stage_of[code.layered.variables[v].producer] for v in code.loss_variables
            }
        for stage in info.stages:
            self.updates.scalars[phase, stage] = sheet.values.scalars(phase, stage)
            if stage in sheet.replicated:
                reads.append(sheet.replicated[stage])
            batch = code.update.reductions[phase - 1].batch
            reads += [self._argument(leaf, stage) for leaf in batch]
            reads += [self.updates.scalars[k, stage] for k in range(1, phase)]
        writes = tuple(self.updates.scalars[phase, stage] for stage in info.stages)
        group = tuple(sorted(givers | set(info.stages)))
        op = GlobalReduce(group[0], tuple(reads), writes, phase=phase, group=group)
        rounds = max(1, (len(group) - 1).bit_length())
        results = () if self._updates_wait(phase) else group
        after = tuple(task for stage in results for task in self._backward_over(stage))
        sheet.add(op, rounds * sheet.durations.send(0), (SYNC, phase), after)

    def _updates_wait(self, phase: int) -> bool:
        """Whether an update waits for a reduction, rather than the step's results alone."""
        update = self.code.update
        replicated = update.replicated_phase if update.replicated else 0
        return phase <= max([replicated, *(layer.phase for layer in update.layers)])

    def _backward_over(self, stage: int) -> tuple[int, ...]:
        """What results stand behind: a stage's last backward, which would wait for them were they before it in its lane."""
        task = self.sheet.last_backward.get((stage, self.code.microbatches - 1))
        return () if task is None else (task,)

    def _replicated(self) -> None:
        """The new replicated state of each stage."""
        sheet, phase = self.sheet, self.code.update.replicated_phase
        for stage, old in sheet.replicated.items():
            new = sheet.values.replicated(stage)
            sheet.outputs.append(new)
            reads = (old, *(self.updates.scalars[k, stage] for k in range(1, phase + 1)))
            op = UpdateShard(stage, reads, (new,), phase=phase)
            sheet.add(op, 0.0, (RESULT, 0))

    def _metrics(self) -> None:
        """What the step returns beside the state."""
        sheet, code = self.sheet, self.code
        if not code.update.metrics_outputs:
            return
        stage = code.metrics_stage
        reads = [self.updates.scalars[k, stage] for k in range(1, len(sheet.reductions) + 1)]
        reads += [sheet.replicated[stage]] if stage in sheet.replicated else []
        reads += [self._argument(leaf, stage) for leaf in code.update.metrics_batch]
        value = sheet.values.metrics(stage)
        sheet.outputs.append(value)
        op = Metrics(stage, tuple(reads), (value,))
        sheet.add(op, 0.0, (RESULT, 1), self._backward_over(stage))
