/* Reads the view that lies in the page, draws it, and goes live where there is a server. */
(function (hf) {
    "use strict";
    const { el, id } = hf;
    const root = document.documentElement;

    /** How much of a long journal has been read, while that is still going on; else null. */
    hf.reading = (view) => (hf.isNumber(view.reading) ? view.reading : null);

    let isMarked = false;
    hf.view = null;
    hf.show = function (view) {
        hf.view = view;
        hf.summary(view);
        hf.labels(view);
        hf.timeline(view);
        hf.metrics(view);
        hf.resources(view);
        hf.stories(view);
        hf.places();
        const reading = hf.reading(view);
        const line = id("reading");
        line.hidden = reading === null;
        if (reading !== null) hf.say(line, `Reading the journal: ${hf.percent(reading)}`);
        id("main").hidden = false;
        if (isMarked) return;
        isMarked = true;
        id("answer").replaceChildren();
        // Charts near the window are drawn now and not when the browser next looks for them.
        for (const box of document.querySelectorAll(".chart")) {
            if (box.getBoundingClientRect().top < window.innerHeight + 300) box.chart.draw();
        }
        const first = document.querySelector(".chart");
        if (first) first.chart.draw();
        performance.mark("holdfast-first-view");
    };

    function broken(text) {
        id("main").hidden = true;
        id("answer").replaceChildren(el("p.notice.is-bad", text));
    }

    const text = id("holdfast-view").textContent.trim();
    let view = null;
    try {
        view = text ? JSON.parse(text) : null;
    } catch {
        broken("The data in this page is not whole: was the file cut short?");
    }
    if (view && view.schema !== 1) {
        broken(`This page knows views of schema 1, and this one has ${view.schema}.`);
        view = null;
    }
    if (view) hf.show(view);
    if (root.dataset.live) {
        if (!view) {
            id("main").hidden = true;
            hf.say(id("name"), document.title.replace(/ · holdfast$/, ""));
            id("answer").replaceChildren(el("p.notice", "Reading the run…"));
        }
        hf.goLive();
    }
})(holdfast);
