"""Reading statistics and programs aloud: as text for people, as JSON, as a drawing for graphviz."""

from graphplan.report.data import describe_data as describe_data
from graphplan.report.rendering import Reports as Reports
from graphplan.report.text import describe as describe
from graphplan.report.text import outcome as outcome
from graphplan.report.text import summary as summary
