/* What each kind of time and event is called and how it looks, by shape as well as by colour. */
(function (hf) {
    "use strict";

    // Name for people, and a pattern, so that nothing rests on colour alone.
    hf.KINDS = {
        training: ["training", ""],
        phase: ["evaluation and other phases", ""],
        starting: ["starting", ""],
        saving: ["saving", ""],
        lost: ["repeated work", "hatch"],
        leaving: ["leaving", ""],
        stuck: ["standing still", "cross"],
        paused: ["held by a debugger or a signal", "dots"],
        queue: ["waiting for the queue", "dots"],
        down: ["down", ""],
        stopped: ["stopped on purpose", ""],
    };
    // Parts of the goodput that are no segments borrow a colour.
    const borrowed = { progress: "training", waiting: "other" };

    hf.kindName = (kind) => (hf.KINDS[kind] ? hf.KINDS[kind][0] : kind);
    hf.kindClass = (kind) => {
        const name = borrowed[kind] || (hf.KINDS[kind] ? kind : "other");
        return "k-" + name;
    };

    hf.swatch = (kind) =>
        hf.el("span", { className: "swatch " + hf.kindClass(kind), aria: { hidden: "true" } });

    // Groups of events: [name, shape, weight, colour variable]; heavier ones are drawn on top.
    hf.GROUPS = {
        death: ["deaths and failures", "cross", 9, "bad"],
        hang: ["hangs", "diamond", 8, "bad"],
        signal: ["signals and requests", "down", 7, "warn"],
        stop: ["stops", "square", 6, "ink"],
        memory: ["memory", "up", 5, "warn"],
        finished: ["finished", "flag", 5, "good"],
        resume: ["starts and resumes", "ring", 4, "accent"],
        trouble: ["other trouble", "up", 7, "bad"],
        other: ["other", "dot", 3, "ink-2"],
        checkpoint: ["checkpoints", "tick", 2, "ink-2"],
        snapshot: ["snapshots", "hair", 1, "edge"],
    };
    const groups = {
        death: "death",
        crash: "death",
        hang: "hang",
        stuck: "hang",
        signal: "signal",
        request: "signal",
        stop: "stop",
        exit: "stop",
        requeue: "stop",
        memory: "memory",
        finished: "finished",
        start: "resume",
        resume: "resume",
        checkpoint: "checkpoint",
        snapshot: "snapshot",
    };
    hf.DEATHS = new Set(["failed", "hung", "killed", "crashed", "out-of-memory", "lost"]);

    /** The group of an event; what an exit is depends on how its attempt ended. */
    hf.groupOf = function (event, outcome) {
        if (event.kind === "exit" && hf.DEATHS.has(outcome)) return "death";
        if (event.kind === "exit" && outcome === "finished") return "finished";
        // A step that took long, or the end of a hang, is no hang.
        if (event.kind === "hang" && event.level !== "bad") return "other";
        if (event.kind === "death" && event.level !== "bad") return "stop";
        // A request to save or for stacks: it ends nothing.
        if (event.kind === "request" && event.level === "info") return "other";
        if (Object.hasOwn(groups, event.kind)) return groups[event.kind];
        return event.level === "bad" ? "trouble" : "other";
    };

    hf.TONES = {
        running: "busy",
        finished: "good",
        closed: "good",
        stopped: "warn",
        interrupted: "warn",
        bad: "bad",
        failed: "bad",
        hung: "bad",
        killed: "bad",
        crashed: "bad",
        "out-of-memory": "bad",
        lost: "bad",
    };
    hf.tone = (outcome) => (Object.hasOwn(hf.TONES, outcome) ? hf.TONES[outcome] : "");

    let held = {};
    /** A colour of the style sheet, for a canvas. */
    hf.colour = function (name) {
        if (!held[name]) {
            const style = getComputedStyle(document.documentElement);
            held[name] = style.getPropertyValue("--" + name).trim() || "#888";
        }
        return held[name];
    };
    document.addEventListener("holdfast-theme", () => {
        held = {};
    });
    hf.sans = () => hf.colour("sans");

    const patterns = new Map();
    /** The fill of a kind of segment: its colour, with its pattern in it. */
    hf.fill = function (context, kind) {
        const known = hf.KINDS[kind] ? kind : "other";
        const colour = hf.colour("s-" + known);
        const motif = hf.KINDS[known] ? hf.KINDS[known][1] : "";
        if (!motif) return colour;
        const scale = window.devicePixelRatio || 1;
        const key = [known, colour, scale].join();
        if (!patterns.has(key)) {
            const tile = document.createElement("canvas");
            tile.width = tile.height = Math.round(6 * scale);
            const ink = tile.getContext("2d");
            ink.scale(tile.width / 6, tile.height / 6);
            ink.fillStyle = colour;
            ink.fillRect(0, 0, 6, 6);
            ink.strokeStyle = ink.fillStyle =
                motif === "dots" ? hf.colour("edge") : hf.colour("raised");
            ink.lineWidth = 1.3;
            ink.beginPath();
            if (motif === "dots") {
                ink.globalAlpha = 0.75;
                ink.fillRect(2, 2, 1.2, 1.2);
            } else {
                ink.globalAlpha = 0.8;
                for (const shift of [-6, 0, 6]) {
                    ink.moveTo(shift - 1, 7);
                    ink.lineTo(shift + 7, -1);
                    if (motif === "cross") {
                        ink.moveTo(shift - 1, -1);
                        ink.lineTo(shift + 7, 7);
                    }
                }
                ink.stroke();
            }
            const pattern = context.createPattern(tile, "repeat");
            pattern.setTransform(new DOMMatrix().scale(1 / scale));
            patterns.set(key, pattern);
        }
        return patterns.get(key);
    };

    /** A canvas of so many CSS pixels, sharp on this screen; returns its context, cleared. */
    hf.ready = function (canvas, width, height) {
        const scale = window.devicePixelRatio || 1;
        const wide = Math.round(width * scale);
        const high = Math.round(height * scale);
        if (canvas.width !== wide || canvas.height !== high) {
            canvas.width = wide;
            canvas.height = high;
            canvas.style.width = width + "px";
            canvas.style.height = height + "px";
        }
        const context = canvas.getContext("2d");
        context.setTransform(scale, 0, 0, scale, 0, 0);
        context.clearRect(0, 0, width, height);
        return context;
    };
})(holdfast);
