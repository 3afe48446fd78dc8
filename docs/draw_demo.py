#!/usr/bin/env python3
"""Draws docs/demo.svg from what tools/demo left in build/demo: the loss of each step, and what the model wrote before and
after. Standard library only.

usage: draw_demo.py build/demo > docs/demo.svg
"""
import html, json, os, sys, textwrap

WIDTH, HEIGHT = 920, 430
PLOT = dict(left=60, top=52, right=430, bottom=370)
INK, MUTED, LINE, GRID = "#1f2933", "#6b7780", "#2f6f4f", "#dfe4e8"


def text(x, y, string, size=13, colour=INK, anchor="start", family="sans-serif", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
            f'font-family="{family}" font-weight="{weight}" xml:space="preserve">{html.escape(string)}</text>')


def curve(losses):
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    x = lambda i: PLOT["left"] + (PLOT["right"] - PLOT["left"]) * i / (len(losses) - 1)
    y = lambda v: PLOT["bottom"] - (PLOT["bottom"] - PLOT["top"]) * (v - low) / (high - low)
    out = []
    for k in range(5):
        value = low + (high - low) * k / 4
        out.append(f'<line x1="{PLOT["left"]}" x2="{PLOT["right"]}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{GRID}"/>')
        out.append(text(PLOT["left"] - 8, y(value) + 4, f"{value:.2f}", 11, MUTED, "end"))
    for step in (0, len(losses) // 2, len(losses) - 1):
        out.append(text(x(step), PLOT["bottom"] + 18, str(step + 1), 11, MUTED, "middle"))
    points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(losses))
    out.append(f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    out.append(text(PLOT["left"], 32, "Training loss, nats per byte", 14, weight="bold"))
    out.append(text((PLOT["left"] + PLOT["right"]) / 2, PLOT["bottom"] + 38, "step", 12, MUTED, "middle"))
    return out


def sample(title, note, body, top):
    out = [text(470, top, title, 14, weight="bold"), text(470, top + 19, note, 12, MUTED)]
    lines = [line for part in body.split("\n") for line in (textwrap.wrap(part, 52) or [""])][:7]
    for i, line in enumerate(lines):
        out.append(text(470, top + 44 + 17 * i, line, 12.5, INK, family="monospace"))
    return out


def main():
    folder = sys.argv[1]
    read = lambda name: open(os.path.join(folder, name), encoding="utf-8", errors="replace").read()
    losses = [json.loads(line)["loss"] for line in read("log.jsonl").splitlines() if '"step"' in line and '"loss"' in line]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    out += curve(losses)
    out += sample("Before", "held-out text: " + read("before-loss.txt").strip(), read("before.txt").strip(), 32)
    out += sample("After", "held-out text: " + read("after-loss.txt").strip(), read("after.txt").strip(), 232)
    print("\n".join(out + ["</svg>"]))


main()
