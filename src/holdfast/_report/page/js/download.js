/* A chart or a table as a file: CSV of its numbers, PNG of its picture. */
(function (hf) {
    "use strict";

    function offer(blob, name) {
        const link = document.createElement("a");
        link.href = URL.createObjectURL(blob);
        link.download = name;
        link.click();
        // The browser reads it after this call has returned.
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    }

    /** A name that every file system takes. */
    hf.fileName = (text, ending) =>
        `${text.replace(/[^\w.-]+/g, "-").replace(/^[-.]+|-+$/g, "") || "chart"}.${ending}`;

    function cell(value) {
        if (value === null || value === undefined) return "";
        const isText = typeof value === "string";
        // A sheet would run a text that begins like a formula.
        const text = isText && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
        return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    }

    hf.csvText = (names, rows) =>
        [names, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

    hf.saveCsv = function (title, names, rows) {
        const text = hf.csvText(names, rows);
        offer(new Blob([text], { type: "text/csv;charset=utf-8" }), hf.fileName(title, "csv"));
    };

    /** The canvas of a chart on its paper, below its title and its key. */
    hf.savePng = function (title, canvas, key) {
        const scale = window.devicePixelRatio || 1;
        const line = 18 * scale;
        const picture = document.createElement("canvas");
        const ink = picture.getContext("2d");
        const font = (size, weight) => `${weight} ${size * scale}px ${hf.sans()}`;
        // The key: as many lines as its names need.
        ink.font = font(11, 400);
        const lines = [[]];
        let wide = 0;
        for (const entry of key) {
            const width = ink.measureText(entry.name).width + 34 * scale;
            if (wide + width > canvas.width - 16 * scale && lines[lines.length - 1].length) {
                lines.push([]);
                wide = 0;
            }
            lines[lines.length - 1].push({ ...entry, x: wide });
            wide += width;
        }
        const head = 30 * scale + (key.length ? lines.length * line : 0);
        picture.width = canvas.width;
        picture.height = canvas.height + head;
        ink.fillStyle = hf.colour("raised");
        ink.fillRect(0, 0, picture.width, picture.height);
        ink.fillStyle = hf.colour("ink");
        ink.textBaseline = "middle";
        ink.font = font(14, 650);
        ink.fillText(title, 8 * scale, 15 * scale);
        ink.font = font(11, 400);
        lines.forEach((entries, at) => {
            const y = 30 * scale + (at + 0.5) * line;
            for (const entry of entries) {
                ink.strokeStyle = entry.colour;
                ink.lineWidth = 2.5 * scale;
                ink.setLineDash((entry.dash || []).map((each) => each * scale));
                ink.beginPath();
                ink.moveTo(8 * scale + entry.x, y);
                ink.lineTo(26 * scale + entry.x, y);
                ink.stroke();
                ink.setLineDash([]);
                ink.fillText(entry.name, 30 * scale + entry.x, y);
            }
        });
        ink.drawImage(canvas, 0, head);
        picture.toBlob((blob) => blob && offer(blob, hf.fileName(title, "png")), "image/png");
    };
})(holdfast);
