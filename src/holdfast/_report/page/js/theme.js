/* Light or dark: as the system has it, until the user chooses. Runs in the head, before paint. */
(function () {
    "use strict";
    const root = document.documentElement;
    const system = window.matchMedia("(prefers-color-scheme: dark)");
    const key = "holdfast-theme";

    function chosen() {
        const asked = /(?:^|[?&#])theme=(light|dark)\b/.exec(location.search + location.hash);
        if (asked) return asked[1];
        try {
            return localStorage.getItem(key);
        } catch {
            return null; // A page opened from a file may have no storage.
        }
    }

    function wear(theme) {
        root.dataset.theme = theme;
        const button = document.getElementById("theme");
        if (button) {
            button.textContent = theme === "dark" ? "Light" : "Dark";
            button.setAttribute("aria-label", theme === "dark" ? "Light colours" : "Dark colours");
        }
        document.dispatchEvent(new CustomEvent("holdfast-theme"));
    }

    let choice = chosen();
    const now = () =>
        choice === "light" || choice === "dark" ? choice : system.matches ? "dark" : "light";
    wear(now());
    system.addEventListener("change", () => wear(now()));

    document.addEventListener("DOMContentLoaded", () => {
        wear(now());
        const button = document.getElementById("theme");
        if (!button) return;
        button.addEventListener("click", () => {
            choice = root.dataset.theme === "dark" ? "light" : "dark";
            try {
                localStorage.setItem(key, choice);
            } catch {
                // As above: nothing to remember it in.
            }
            wear(choice);
        });
    });

    // Paper is white: what the canvases hold is drawn again in ink for it.
    window.addEventListener("beforeprint", () => wear("light"));
    window.addEventListener("afterprint", () => wear(now()));
})();
