"""Adds the updates of layers, the views gathered from them, and what validates those that were made early."""

from __future__ import annotations

from ratrain_jax.lowering.program import Borrow, PrefetchView, UpdateShard, Validate
from ratrain_jax.lowering.sheet import GATHER, TRANSFER, UPDATE, Sheet


class UpdateTasks:
    """Adds what turns gradients into new state and new views.

    Attributes:
        sheet: the growing program.
        gradients: the final gradient shard of each layer.
        syncs: the tasks that make the gradients of a stage final.
        partials: what each layer gives to each reduction, by (layer, reduction).
        scalars: what each reduction gives, by (reduction, stage).
        joined: with ZeRO-2, the tied layer of each stage whose shares are joined last.
    """

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.code = sheet.code
        self.gradients: dict[int, int] = {}
        self.syncs: dict[int, list[int]] = {}
        self.partials: dict[tuple[int, int], int] = {}
        self.scalars: dict[tuple[int, int], int] = {}
        self.joined: dict[int, int] = {}
        # The last update of each stage's first layer.
        self._first_updates: dict[int, int] = {}
        # What the early update of each layer wrote, and the view of it.
        self._early: dict[int, tuple[int, ...]] = {}

    @property
    def stateful(self) -> list[int]:
        """Layers that own parameters."""
        return [n for n, layer in enumerate(self.code.layered.layers) if layer.owned]

    def homes(self, layer: int) -> list[int]:
        """The stages that hold a view of a layer: its own first."""
        return [self.code.stage_of[layer], *self.code.borrowers(layer)]

    def gather(
        self,
        layer: int,
        parameters: int,
        table: dict[tuple[int, int], int],
        opens: bool,
        after: tuple[int, ...] = (),
    ) -> None:
        """Views of a layer from its shards, on its own stage and on the borrowers'.

        Args:
            layer: the layer.
            parameters: its shards.
            table: where to write down the views.
            opens: whether its chain in the window is closed by it.
            after: tasks that it stands behind.
        """
        sheet = self.sheet
        home = self.code.stage_of[layer]
        chain = (home, layer)
        for stage in self.homes(layer):
            view = sheet.values.view(layer, stage)
            table[stage, layer] = view
            seconds = sheet.durations.collective(sheet.bytes(view))
            closes = chain if opens and stage == home else None
            if stage == home:
                op = PrefetchView(home, (parameters,), (view,), layer=layer)
            else:
                op = Borrow(home, (parameters,), (view,), layer=layer, target=stage)
                seconds += sheet.durations.send(sheet.bytes(parameters), stage - home)
            sheet.add(op, seconds, (GATHER, layer), after, closes=closes)

    def chain(self, layer: int) -> tuple[int, int] | None:
        """The layer's chain in its stage's window, where its update follows its sync at once.

        Not so where it is to be validated: its gradient lives longer, and no sync that a reduction waits for may wait for views.
        """
        if not self.sheet.settings.update_prefetch or self.code.update.layers[layer].phase:
            return None
        return (self.code.stage_of[layer], layer)

    def update(self, layer: int, phase: int) -> None:
        """One phase of a layer's update; the last is followed by the views of the next step."""
        sheet, stage = self.sheet, self.code.stage_of[layer]
        update = self.code.update.layers[layer]
        final = phase == update.phase
        early = sheet.early[layer]
        if phase == early:
            self._update_early(layer, phase)
        if final and early is not None:
            self._validate(layer)
            return
        partials = self._partials(layer, phase)
        if not final and not partials:
            return
        own = (self.gradients[layer], *sheet.state[layer])
        reads = [*own, *self._shared(stage, phase)]
        writes = [*partials]
        if final:
            new = self._new(layer)
            writes += new
            sheet.outputs += new
        op = UpdateShard(
            stage, tuple(reads), tuple(writes), own if final else (), layer=layer, phase=phase
        )
        after = () if sheet.settings.update_prefetch else tuple(self.syncs[stage])
        seconds = sheet.durations.sweep(2 * sum(sheet.bytes(v) for v in own))
        chain, held = self._window_of_update(layer) if final else (None, 0)
        rank = (UPDATE, phase, 0 if layer == self._first_updated(stage) else 1, layer)
        if final and self._between_backwards(stage):
            rank = (TRANSFER, layer)
        task = sheet.add(op, seconds, rank, after, opens=chain, held=held)
        if final and sheet.settings.update_prefetch:
            views: dict[tuple[int, int], int] = {}
            behind = self._last_syncs(stage, task)
            self.gather(layer, writes[len(partials)], views, opens=True, after=behind)
            sheet.outputs += views.values()

    def _shared(self, stage: int, phase: int) -> list[int]:
        """What an update reads that is not its layer's own: replicated state, and the scalars of some reductions."""
        replicated = self.sheet.replicated
        shared = [replicated[stage]] if stage in replicated else []
        return shared + [self.scalars[k, stage] for k in range(1, phase + 1)]

    def _new(self, layer: int) -> list[int]:
        """What a layer's last update writes beside its partials: parameters, optimizer, and outputs where it has some."""
        values = self.sheet.values
        new = [values.parameters(layer), values.optimizer(layer)]
        if self.code.update.layers[layer].outputs:
            new.append(values.layer_outputs(layer))
        return new

    def _update_early(self, layer: int, phase: int) -> None:
        """A layer's last update behind some of its reductions, as if all were over, and the view of what it makes."""
        sheet, stage = self.sheet, self.code.stage_of[layer]
        update = self.code.update.layers[layer]
        own = (self.gradients[layer], *sheet.state[layer])
        reads = (*own, *self._shared(stage, phase))
        partials = [sheet.values.partials(layer, update.phase)] if update.partials[-1] else []
        new = self._new(layer)
        op = UpdateShard(stage, reads, (*partials, *new), (), layer=layer, phase=update.phase)
        seconds = sheet.durations.sweep(2 * sum(sheet.bytes(v) for v in own))
        chain, held = self._window_of_update(layer)
        rank = (TRANSFER, layer) if self._between_backwards(stage) else (UPDATE, phase, 2, layer)
        task = sheet.add(op, seconds, rank, opens=chain, held=held)
        views: dict[tuple[int, int], int] = {}
        self.gather(layer, new[0], views, opens=True, after=self._last_syncs(stage, task))
        self._early[layer] = (*partials, *new, *views.values())

    def _validate(self, layer: int) -> None:
        """Keeps what a layer's early update made, or makes it anew."""
        sheet, stage = self.sheet, self.code.stage_of[layer]
        phase = self.code.update.layers[layer].phase
        own = (self.gradients[layer], *sheet.state[layer])
        early = self._early[layer]
        reads = (*own, *self._shared(stage, phase), *early)
        kept = [*self._new(layer), sheet.values.view(layer, stage)]
        writes = (*self._partials(layer, phase), *kept)
        sheet.outputs += kept
        op = Validate(stage, reads, writes, (*own, *early), layer=layer, phase=phase)
        sheet.add(op, 0.0, (GATHER, layer))

    def _last_syncs(self, stage: int, update: int) -> tuple[int, ...]:
        """What the gathers of a lone stage stand behind, where its window has room for all its layers.

        Behind its syncs: between them a gather would keep a gradient waiting. And behind the update of its first layer: the
        next step waits for that one's view, and a gather that begins meanwhile would keep it waiting. In a pipeline the first
        stage's drain leaves them time, and later stages' next forwards come late.

        Args:
            stage: the stage.
            update: the task of the update whose view is to be gathered.
        """
        settings = self.sheet.settings
        roomy = len(self.stateful) <= settings.window_layers and settings.window_bytes is None
        if settings.stages > 1 or not roomy:
            return ()
        first = self._first_updates.setdefault(stage, update)
        return (*self.syncs[stage], first)

    def _between_backwards(self, stage: int) -> bool:
        """Whether updates go between backwards: on stage 0, for whose gradients nobody waits, so that gathers hide behind them.

        On the others they go in the drain.
        """
        return self.sheet.settings.update_prefetch and stage == 0

    def _first_updated(self, stage: int) -> int | None:
        """Without prefetch, the layer that is synchronised last: if it goes first, no update overlaps with a sync."""
        if self.sheet.settings.update_prefetch:
            return None
        if stage in self.joined:
            return self.joined[stage]
        owners = [n for n in self.stateful if self.code.stage_of[n] == stage]
        return owners[0] if self.sheet.settings.layerwise_state else owners[-1]

    def _window_of_update(self, layer: int) -> tuple[tuple[int, int] | None, int]:
        """A chain that a reduction decides on opens with its update; with it, the bytes that it holds."""
        sheet, stage = self.sheet, self.code.stage_of[layer]
        held = sheet.bytes(self.gradients[layer]) + sheet.bytes(sheet.views[stage, layer])
        late = sheet.settings.update_prefetch and self.code.update.layers[layer].phase > 0
        return ((stage, layer) if late else None), held

    def _partials(self, layer: int, phase: int) -> list[int]:
        if not self.code.update.layers[layer].partials[phase]:
            return []
        value = self.sheet.values.partials(layer, phase)
        self.partials[layer, phase + 1] = value
        return [value]
