"""Checks in a browser what the site's search finds: ``python docs/check_search.py``.

Each search of ``SEARCHES`` must find one of its pages among the first three. One in ten may miss.
"""

from __future__ import annotations

import sys

from check_layout import SITE, browser_page
from playwright.sync_api import Page

FIRST = 3
# What readers look for, and the pages that say it.
SEARCHES = {
    "ALiBi": "faq",
    "attention map": "faq",
    "bfloat16": "explanation/numbers faq",
    "calibrate": "how_to/calibrate",
    "chip-hours": "how_to/pod_costs",
    "checkpoint": "how_to/train_a_vit",
    "causal mask": "how_to/models_of_others faq",
    "cite": "bibliography",
    "decoding": "how_to/decode",
    "dropout": "faq",
    "exact keys": "how_to/calibrate",
    "flash attention": "faq",
    "Gaussian process": "how_to/scikit_learn",
    "GPU": "faq explanation/speed",
    "held out": "how_to/image_data how_to/train_a_vit",
    "how fast": "explanation/speed",
    "Hugging Face": "how_to/hugging_face",
    "ImageNet": "how_to/image_data how_to/pods",
    "install": "index",
    "KV cache": "explanation/virtual_tokens faq",
    "Llama": "how_to/hugging_face",
    "Matern": "reference/kernels reference/api/simrf_jax.kernels.Matern",
    "memory": "explanation/speed faq",
    "NaN": "faq explanation/guarantees",
    "number of features": "explanation/choosing_features",
    "packed sequences": "how_to/models_of_others faq",
    "padding mask": "faq",
    "preemption": "how_to/train_a_vit how_to/pods",
    "PyTorch": "faq",
    "redraw": "explanation/redraws",
    "relative position bias": "faq",
    "RoPE": "faq",
    "rotary embeddings": "faq",
    "scikit-learn": "how_to/scikit_learn",
    "shard sequence": "how_to/long_sequences",
    "swap attention": "how_to/own_model how_to/hugging_face",
    "StableHLO": "how_to/export_a_vit",
    "TensorBoard": "how_to/train_a_vit",
    "TPU kernel": "explanation/speed",
    "TPU pod": "how_to/pods how_to/pod_costs",
    "unbiased": "explanation/guarantees explanation/numbers",
}
# The pages of the results, in their order, once the list no longer grows.
FOUND = """async () => {
  const links = () => [...document.querySelectorAll("#search-results li > a")];
  let before = -1;
  while (links().length !== before || document.querySelector("#search-results .dots")) {
    before = links().length;
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  return links().map((a) => a.getAttribute("href").replace(/\\.html.*/, ""));
}"""


def found(page: Page, search: str) -> list[str]:
    """Returns the first pages that a search finds."""
    words = search.replace(" ", "+")
    page.goto(f"{(SITE / 'search.html').as_uri()}?q={words}")
    return list(dict.fromkeys(page.evaluate(FOUND)))[:FIRST]


def main() -> str | None:
    """Prints the searches that miss; returns a sentence if there are too many."""
    with browser_page() as page:
        results = {search: found(page, search) for search in SEARCHES}
    missed = [name for name, pages in results.items() if not {*SEARCHES[name].split()} & {*pages}]
    for name in missed:
        print(f"{name!r} finds {', '.join(results[name]) or 'nothing'}.")
    print(f"{len(results) - len(missed)} of {len(results)} searches find their page.")
    return "Too many miss." if len(missed) > len(results) // 10 else None


if __name__ == "__main__":
    sys.exit(main())
