/* Pointer, wheel and keys on the timeline. Nothing here is reachable by the pointer alone. */
(function (hf) {
    "use strict";

    /** What lies under a point of the rows: marks close by, else a stretch of time. */
    function under(state, x, y) {
        const lane = state.shown[Math.floor(y / state.rowHeight)];
        if (!lane) return null;
        const wide = state.width - state.gutter - hf.TOP.right;
        const scale = (state.to - state.from) / wide;
        const place = state.from + (x - state.gutter) * scale;
        const near = lane.events
            .filter((mark) => !state.hidden.has(mark.group))
            .map((mark) => ({ mark, far: Math.abs(state.axis.to(mark.event.t) - place) / scale }))
            .filter((each) => each.far <= 7)
            .sort(
                (a, b) =>
                    Boolean(a.mark.isQuiet) - Boolean(b.mark.isQuiet) ||
                    hf.GROUPS[b.mark.group][2] - hf.GROUPS[a.mark.group][2] ||
                    a.far - b.far,
            )
            .map((each) => each.mark);
        const segment = x >= state.gutter ? hf.segmentAt(lane, state.axis.from(place)) : null;
        return { lane, marks: near, segment, place };
    }

    function tell(state, found) {
        if (!found) return null;
        if (found.marks.length) {
            const shown = found.marks.slice(0, 4).map((mark) => hf.eventLines(mark.event));
            const more = found.marks.length - shown.length;
            if (more > 0)
                shown.push(["", "", `and ${hf.plural(more, "more event")} here; zoom in`]);
            return shown;
        }
        if (found.segment) return [hf.segmentLines(found.segment)];
        return [hf.attemptLines(found.lane.attempt)];
    }

    hf.takeHands = function (state, act) {
        const { canvas, top, box } = state;
        let drag = null;
        const at = (event, node) => {
            const area = node.getBoundingClientRect();
            return [event.clientX - area.left, event.clientY - area.top];
        };
        const inside = (x) => Math.min(state.width - hf.TOP.right, Math.max(state.gutter, x));
        const share = (x) =>
            (inside(x) - state.gutter) / (state.width - state.gutter - hf.TOP.right);
        const place = (x) => state.from + share(x) * (state.to - state.from);

        function rubber(x0, x1) {
            state.rubber.hidden = Math.abs(x1 - x0) < 4;
            state.rubber.style.left = Math.min(x0, x1) + "px";
            state.rubber.style.width = Math.abs(x1 - x0) + "px";
        }

        canvas.addEventListener("pointerdown", (event) => {
            if (event.button !== 0) return;
            const [x] = at(event, canvas);
            drag = { kind: "select", x: inside(x) };
            canvas.setPointerCapture(event.pointerId);
        });
        canvas.addEventListener("pointermove", (event) => {
            const [x, y] = at(event, canvas);
            if (drag) {
                act.hide();
                rubber(drag.x, inside(x));
                return;
            }
            const found = under(state, x, y);
            canvas.style.cursor = found && found.marks.length ? "pointer" : "crosshair";
            const lines = tell(state, found);
            if (lines) act.show(lines, x, y);
            else act.hide();
        });
        canvas.addEventListener("pointerleave", () => {
            if (!drag) act.hide();
        });
        canvas.addEventListener("pointerup", (event) => {
            if (!drag) return;
            const [x, y] = at(event, canvas);
            const from = drag.x;
            drag = null;
            rubber(0, 0);
            if (Math.abs(inside(x) - from) >= 5) {
                const ends = [place(from), place(x)].sort((a, b) => a - b);
                act.zoom(ends[0], ends[1]);
                return;
            }
            const found = under(state, x, y);
            if (!found) return;
            act.choose(found.marks[0] || null, found.lane);
            act.show(tell(state, found), x, y);
        });
        canvas.addEventListener("pointercancel", () => {
            drag = null;
            rubber(0, 0);
        });
        canvas.addEventListener("dblclick", () => act.zoom(0, state.axis.length));

        // The overview: drag the window about, or draw a new one.
        let hold = null;
        top.addEventListener("pointerdown", (event) => {
            const [x, y] = at(event, top);
            if (event.button !== 0 || y > hf.TOP.lane + 6) return;
            const spot = share(x) * state.axis.length;
            const zoomed = state.from > 0 || state.to < state.axis.length;
            const within = zoomed && spot >= state.from && spot <= state.to;
            hold = within ? { pan: spot - state.from } : { draw: spot };
            top.setPointerCapture(event.pointerId);
        });
        top.addEventListener("pointermove", (event) => {
            if (!hold) return;
            const spot = share(at(event, top)[0]) * state.axis.length;
            if (hold.pan !== undefined) {
                const length = state.to - state.from;
                const from = Math.min(state.axis.length - length, Math.max(0, spot - hold.pan));
                act.zoom(from, from + length);
            } else if (Math.abs(spot - hold.draw) > state.axis.length / 200) {
                act.zoom(Math.min(spot, hold.draw), Math.max(spot, hold.draw));
            }
        });
        for (const name of ["pointerup", "pointercancel"]) {
            top.addEventListener(name, () => {
                hold = null;
            });
        }
        top.addEventListener("dblclick", () => act.zoom(0, state.axis.length));

        // A plain wheel scrolls the page: only a pinch, or Ctrl or Shift held, is meant for us.
        box.addEventListener(
            "wheel",
            (event) => {
                const area = canvas.getBoundingClientRect();
                if (event.ctrlKey || event.metaKey) {
                    event.preventDefault();
                    act.scale(
                        Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008),
                        share(event.clientX - area.left),
                    );
                } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) * 2) {
                    if (state.from <= 0 && state.to >= state.axis.length) return;
                    event.preventDefault();
                    act.pan((event.deltaX || event.deltaY) / 600);
                }
            },
            { passive: false },
        );

        const keys = {
            ArrowRight: (event) => (event.shiftKey ? act.pan(0.2) : act.step(1)),
            ArrowLeft: (event) => (event.shiftKey ? act.pan(-0.2) : act.step(-1)),
            ArrowDown: () => act.stepLane(1),
            ArrowUp: () => act.stepLane(-1),
            Home: () => act.step(-Infinity),
            End: () => act.step(Infinity),
            "+": () => act.scale(0.6, null),
            "=": () => act.scale(0.6, null),
            "-": () => act.scale(1 / 0.6, null),
            0: () => act.zoom(0, state.axis.length),
            Enter: () => act.zoomLane(),
            Escape: () => act.hide(),
        };
        state.rows.addEventListener("keydown", (event) => {
            if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key))
                return;
            event.preventDefault();
            keys[event.key](event);
        });
        state.rows.addEventListener("blur", () => act.hide());
    };
})(holdfast);
