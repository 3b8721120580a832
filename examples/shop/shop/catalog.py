"""
What the shop sells, and for how much.

The catalog itself is a small table. A price list is worth caching: it fits a demand curve to almost four years of sales
of each product and looks for the price that earns most, about 20 ms of computing per region.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    id: int
    name: str
    kind: str
    colour: str
    cost_cents: int
    description: str

    @property
    def sku(self) -> str:
        return f"{self.kind[:3].upper()}-{self.id:04d}"


@dataclass(frozen=True, slots=True)
class Region:
    code: str
    name: str
    symbol: str
    tax_percent: int


@dataclass(frozen=True, slots=True)
class Week:
    """One week of sales of one product."""

    price_cents: float
    sold: float


REGIONS = {
    region.code: region
    for region in (
        Region("eu", "Europe", "€", 21),
        Region("uk", "United Kingdom", "£", 20),
        Region("us", "United States", "$", 7),
        Region("jp", "Japan", "¥", 10),
    )
}
DEFAULT_REGION = "eu"

KINDS = {
    "mug": ("Stoneware, *dishwasher safe*, holds 350 ml.", 410),
    "lamp": ("Warm light, **dimmable**, 1.2 m of cable.", 1890),
    "chair": ("Beech and linen, 46 cm high. See [care](/about).", 6400),
    "clock": ("Silent movement, runs 18 months on `1 AA` cell.", 1530),
    "notebook": ("192 pages of 90 g paper, lies *flat* when open.", 320),
    "blanket": ("Merino wool, 130 x 180 cm, **woven in the north**.", 4250),
}
STYLES = ("Harbour", "Meadow", "Granite", "Ember", "Birch", "Tide", "Saffron", "Dusk")
COLOURS = ("#2a6f97", "#6a994e", "#6c757d", "#d1495b", "#c9b79c", "#468faf", "#e9a23b", "#5e548e")


def _stock_the_shelves() -> tuple[Product, ...]:
    products: list[Product] = []
    for kind, (description, cost_cents) in KINDS.items():
        for number, style in enumerate(STYLES):
            products.append(
                Product(
                    id=len(products) + 1,
                    name=f"{style} {kind}",
                    kind=kind,
                    colour=COLOURS[number],
                    cost_cents=cost_cents + 35 * number,
                    description=f"The {style.lower()} {kind}. {description}",
                )
            )
    return tuple(products)


PRODUCTS = _stock_the_shelves()
BY_ID = {product.id: product for product in PRODUCTS}


def sales_history(product: Product, region: str, weeks: int = 190) -> list[Week]:
    """What the till recorded. Made up here, but the same on every host and in every process."""
    chance = random.Random(f"{region}/{product.id}")
    elasticity = chance.uniform(-3.2, -1.7)
    history = []
    for week in range(weeks):
        price_cents = product.cost_cents * chance.uniform(1.2, 2.4)
        season = 1.0 + 0.2 * math.sin(week / 52 * math.tau)
        sold = 40.0 * season * (price_cents / product.cost_cents) ** elasticity * chance.uniform(0.9, 1.1)
        history.append(Week(price_cents, sold))
    return history


def demand_elasticity(history: list[Week]) -> float:
    """The slope of log(sold) over log(price), by least squares; kept where a best price exists."""
    xs = [math.log(week.price_cents) for week in history]
    ys = [math.log(week.sold) for week in history]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    variance = sum((x - mean_x) ** 2 for x in xs)
    return min(-1.3, max(-5.0, covariance / variance))


def best_price(cost_cents: int, elasticity: float) -> int:
    """The price, in steps of 2 % of the cost, that earns most; then rounded up to end in 9."""
    candidates = [cost_cents * (1.04 + step / 50) for step in range(160)]
    earns_most = max(candidates, key=lambda price: (price - cost_cents) * math.pow(price / cost_cents, elasticity))
    return math.ceil(earns_most / 10) * 10 - 1


@functools.lru_cache(maxsize=64)
def prices(region: str) -> Mapping[int, int]:
    """
    The price of each product in cents, by product id. Shared: do not change it.

    Raises:
        KeyError: there is no such region.
    """
    if region not in REGIONS:
        raise KeyError(region)
    return {
        product.id: best_price(product.cost_cents, demand_elasticity(sales_history(product, region)))
        for product in PRODUCTS
    }


@functools.lru_cache(maxsize=256)
def related(product_id: int) -> tuple[int, ...]:
    """Up to four products that go with this one: same style first, then same kind."""
    product = BY_ID[product_id]
    style = product.name.split()[0]
    others = [other for other in PRODUCTS if other.id != product_id]
    others.sort(key=lambda other: (style not in other.name, other.kind != product.kind, other.id))
    return tuple(other.id for other in others[:4])
