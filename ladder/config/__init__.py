"""What a model is: dimensions, family, wiring; named sizes; from and to Hugging Face's config.json."""

from ladder.config.fields import read_json as read_json
from ladder.config.model import DTYPES as DTYPES
from ladder.config.model import Experts as Experts
from ladder.config.model import ModelConfig as ModelConfig
from ladder.config.rope import Rope as Rope
from ladder.config.sizes import SIZES as SIZES
