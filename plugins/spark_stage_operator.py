"""A stage that uses Spark, as a SparkSubmitOperator: Airflow's own way to start, follow and kill an application."""

from functools import partial
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from pipeline_tasks import RETRIES, RETRY_DELAY, answer, impatient_settings, name_of_run
from run_links import LINKS, show_links

from tasks.errors import StageError
from tasks.spark import SparkSubmission
from tasks.stage_list import STAGES


class SparkStageOperator(SparkSubmitOperator):
    """Executes the stage that its task is called after; submits to Spark only when the stage asks for it.

    The application, its arguments and its environment come from the stage, which the command line uses too.
    The environment is the submission's whole one: Airflow's own variables, with its database password, stay
    here (the provider would add to them).
    """

    def __init__(self, task_id: str, **kwargs: Any) -> None:
        """Takes what every operator takes; `task_id` is the stage."""
        defaults = {"retries": RETRIES, "retry_delay": RETRY_DELAY, "doc_md": STAGES[task_id].says}
        super().__init__(task_id=task_id, **{**defaults, **kwargs})
        self.operator_extra_links = LINKS.get(task_id, ())
        self._clean_environment: dict[str, str] = {}

    def execute(self, context: Any) -> dict[str, Any]:
        """Execute the stage; returns its result for XCom."""
        from tasks import stages

        show_links(context)
        try:
            return vars(
                stages.execute(
                    self.task_id,
                    name_of_run(context),
                    settings=impatient_settings(),
                    submit=partial(self._submit, context),
                )
            )
        except StageError as error:
            answer(error, context)

    def _submit(self, context: Any, submission: SparkSubmission) -> None:
        from airflow.sdk.exceptions import AirflowException

        from tasks.batch.submit import failure

        self.name = submission.name
        self.application = str(submission.application)
        self.application_args = list(submission.arguments)
        self.conf = dict(submission.conf)
        self._spark_binary = str(submission.binary)
        self._clean_environment = dict(submission.environment)
        try:
            super().execute(context)
        except AirflowException as error:
            raise failure(str(error).splitlines(), f"the Spark application failed: {error}") from None

    def _get_hook(self) -> Any:
        hook = super()._get_hook()
        hook.submit = partial(hook.submit, env=self._clean_environment)
        return hook
