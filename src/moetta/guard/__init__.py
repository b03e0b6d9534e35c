"""A guard around an adapter: adaptation that is safe to leave on.

```python
guard = moetta.Guard(moetta.adapt(model, "moetta"))
logits = guard(images)
guard.last.guard.mode, guard.events
```
"""

from moetta.guard.config import GuardConfig
from moetta.guard.events import Event, Findings, GuardReport
from moetta.guard.guard import Guard
from moetta.guard.watch import Look

__all__ = ["Event", "Findings", "Guard", "GuardConfig", "GuardReport", "Look"]
