"""Phrases that messages are put together from: an opener with what a record must have, and one phrase for
each other field. Sentences stand one after the other; fragments have a separator between them.

Choices are written as in `templates`. A phrase belongs to the field whose name its key is, and an opener
that has the slot of that name does without the phrase.
"""

from __future__ import annotations

# ruff: noqa: E501
Phrases = tuple[tuple[str, ...], dict[str, tuple[str, ...]]]
"""Openers, and the phrases of each other field."""

SENTENCES: dict[str, Phrases] = {
    "appointment": (
        (
            "(Please note|I noted|We have): {title}.",
            "{Title} (is planned|is coming up|is on the list).",
            "There will be {title} {date}.",
            "(I would like|I'd love|We want) to have {title} {date}.",
            "(Is there time|Do we have a slot) for {title}?",
            "We (agreed on|fixed|settled) {title} {date}.",
            "The (subject|topic|event) is {title}.",
            "(Your|My|Our) {title} (stands|is confirmed|is set).",
            "It is about {title}.",
            "{date} (is good|works|suits me) for {title}.",
            "(Somebody|He|She) asked for {title}.",
            "Let's do {title}.",
        ),
        {
            "date": (
                "It is {date}.", "The (day|date) is {bare_date}.", "It will be {date}.", "We do it {date}.", "(Make|Call) it {bare_date}.", "{Bare_date} is the day.", "It was put down for {bare_date}.", "(Everyone can|All can|I can) come {date}.", "I am free {date}.", "{Date}, please.",
            ),
            "time": (
                "It (starts|begins) {time}.", "(We meet|We start|We begin) {time}.", "The time is {bare_time}.", "Be there {time}.", "{Bare_time} (would be|is) fine.", "(Let us say|Let's say|Say) {bare_time}.", "Doors open {time}.", "(From|Not before) {bare_time}.", "I can make it {time}.", "The start is {time}.", "{Time}, if possible.",
            ),
            "minutes": (
                "It (takes|lasts) {bare_minutes}.", "It is {bare_minutes} long.", "(Plan|Allow|Reckon with) {bare_minutes}.", "We (need|have|get) {bare_minutes}.", "That is {bare_minutes} in all.", "{Bare_minutes} (will do|are planned|should suffice).", "It goes on for {bare_minutes}.", "(Length|Planned length): {bare_minutes}.", "(Keep|Block) {bare_minutes} free.", "It will be over after {bare_minutes}.",
            ),
            "place": (
                "The (venue|place|location) is {bare_place}.", "It is {place}.", "(We meet|We sit|It happens) {place}.", "(Come|Go|Walk) to {bare_place}.", "It takes place {place}.", "We (chose|picked|booked) {bare_place}.", "{Bare_place} is where we meet.", "(See you|Find us) {place}.", "I will wait {place}.", "{Bare_place} was the only free place.",
            ),
            "people": (
                "{People} will (come|join|attend|be there).", "(I go|We go|It is) with {people}.", "(With us|Also there|Coming): {people}.", "I (asked|invited|told) {people}.", "(Bring|Invite|Take along) {people}.", "The (group|guests|others): {people}.", "{People} said yes.", "{People} must not miss it.", "(Participants|Attendees) will be {people}.", "{People} wanted it.",
            ),
        },
    ),
    "order": (
        (
            "(Please send|Please ship|Kindly deliver) {items}.",
            "(We need|I need|We require) {items}.",
            "(The order is|It is an order for|Ordered were): {items}.",
            "(I take|I'd take|We take) {items}.",
            "{Items} (should be sent|must be packed|are wanted).",
            "(Is there|Could you find|Can you get) {items}?",
            "Put {items} on the list.",
            "(I was told|They told us) to order {items}.",
            "We are (short of|missing|lacking) {items}.",
            "There is (a new|another|one more) order: {items}.",
            "(Could|Would) you (pack|prepare) {items}?",
            "The (goods|articles) are {items}.",
        ),
        {
            "customer": (
                "The (customer|client|buyer) is {customer}.", "It is for {customer}.", "{Customer} (pays|will pay).", "(Send|Address) the invoice to {customer}.", "{Customer} (ordered|asked for|wants) it.", "I am (writing|calling) for {customer}.", "The name is {customer}.", "(Charge|Bill) {customer}.", "The box goes to {customer}.", "(Greetings|Regards), {customer}.", "{Customer} is waiting.",
            ),
            "due": (
                "It is due {due_on}.", "(We need|I need|They need) it {due_on}.", "The (deadline|last day|latest date) is {due}.", "(Deliver|Send|Ship) it {due_on}.", "It (must|has to|should) be there by {due}.", "No later than {due}.", "(Not after|Before) {due}.", "By {due}, please.", "Delivery is {due_on}.", "{Due} is (the latest|early enough|fine).", "Can it be here {due_on}?", "Asap, but {due} at the latest.",
            ),
        },
    ),
    "contact": (
        (
            "(The contact|The person|Our contact) is {name}.",
            "I am {name}.",
            "(Please call|Please write to|Please ask) {name}.",
            "{Name} (would like to talk|wants to hear from us|has a question).",
            "(Save|Keep|Store|Note) {name}.",
            "(Have you met|Do you remember|Did you see) {name}?",
            "{Name} (is new here|has a new job|looks after this).",
            "(The one to ask|The right person) is {name}.",
            "(Yesterday I met|I found|I know) {name}.",
            "Here are the details of {name}.",
            "(Speak to|Get in touch with|Turn to) {name}.",
            "{Name} (left a card|gave me a card|called).",
        ),
        {
            "company": (
                "The (company|firm|employer) is {company}.", "(She|He) (works for|works at|is with) {company}.", "It is about {company}.", "{Company} is the employer.", "The business is called {company}.", "(She|He) (runs|owns|joined) {company}.", "The card says {company}.", "That is {company}.", "Ask at {company}.", "(She|He) speaks for {company}.",
            ),
            "email": (
                "The (mail|e-mail|address) is {email}.", "(Write|Mail) to {email}.", "{Email} is the mail.", "(Mail|E-mail): {email}.", "(Use|Try) {email}.", "Mails go to {email}.", "(She|He) reads {email}.", "Answers to {email}, please.", "You may write: {email}.", "Send it to {email}.",
            ),
            "phone": (
                "The (phone|mobile|telephone) is {phone}.", "(Call|Dial|Ring) {phone}.", "(His|Her|My) number is {phone}.", "{Phone} is the (number|mobile).", "(Phone|Tel|Mobile): {phone}.", "Reachable (on|at|under) {phone}.", "(Text|Try) {phone}.", "On the phone: {phone}.", "There is a new number, {phone}.", "You can call {phone}.",
            ),
            "city": (
                "The (city|town) is {city}.", "(She|He) (lives|works|sits) in {city}.", "The (office|firm) is in {city}.", "{City} is (home|the place).", "(Based|Located) in {city}.", "That is in {city}.", "(She|He) moved to {city}.", "It is an office in {city}.", "(She|He) comes from {city}.", "You will find the office in {city}.",
            ),
        },
    ),
    "measurement": (
        (
            "The {quantity} is {reading}.",
            "We (have|had|read) {reading} of {quantity}.",
            "(I measured|I read|I noted) {reading} {quantity}.",
            "{Quantity} (stands at|came to|went to) {reading}.",
            "It (says|showed|reads) {reading} {quantity}.",
            "{reading} is the {quantity}.",
            "(New|Last|Next) {quantity}: {reading}.",
            "{Quantity} was (measured|checked|read): {reading}.",
            "(Around|About) {reading} of {quantity}.",
            "There is a {quantity} of {reading}.",
            "Is {reading} a good {quantity}?",
            "A {quantity} of {reading} was (seen|reported|noted).",
        ),
        {
            "sensor": (
                "It (comes|is) from {sensor}.", "The (sensor|source|device) is {sensor}.", "{Sensor} (sent|gave|reported) it.", "It was read at {sensor}.", "That was {sensor}.", "(Look|Check) at {sensor}.", "{Sensor} should be checked.", "I was near {sensor}.", "(Source|Sensor): {sensor}.", "This is about {sensor}.",
            ),
            "date": (
                "It is for {bare_date}.", "The (day|date) is {bare_date}.", "It counts {date}.", "(Date|Day): {bare_date}.", "That is {date}.", "It was noted for {bare_date}.", "{Date}, that is.", "The day was {bare_date}.", "Write it down for {bare_date}.", "It goes into the list of {bare_date}.",
            ),
            "time": (
                "It was read {time}.", "The time was {bare_time}.", "It was {bare_time}.", "(Taken|Noted|Checked) {time}.", "(Time|Clock): {bare_time}.", "I looked {time}.", "That was {time}.", "The clock said {bare_time}.", "It came in {time}.", "{Time}, to be exact.",
            ),
        },
    ),
    "log": (
        (
            "{Service} (reports|logged|raised) {level}: {fault}.",
            "{LEVEL} by {service}. It says: {fault}.",
            "The (unit|daemon|component) {service} (wrote|says) \"{fault}\". The level is {level}.",
            "\"{fault}\" was (raised|reported|logged) by {service} as {level}.",
            "(Level|Severity) {level}, (component|service) {service}: {fault}.",
            "We (got|saw|have) {level} of {service}: {fault}.",
            "In {service}: {fault}. It is {level}.",
            "{fault}, says {service}. (Severity|Level): {level}.",
            "{Service} is at {level}. The text is: {fault}.",
            "The {level} is: {fault}. It comes from {service}.",
            "(Look|Check): {level}, {service}, {fault}.",
            "Message of {service}: {fault}. Level: {level}.",
        ),
        {
            "code": (
                "The (code|status|rc) is {code}.", "The exit status was {code}.", "It (exited|ended|stopped) with {code}.", "(Errno|Code|Status) {code}.", "Its code: {code}.", "The return code was {code}.", "It gave code {code}.", "{code} is the (code|status).", "(Exit|Return) code {code}.", "The answer had status {code}.",
            ),
            "date": (
                "The (day|date) was {iso_date}.", "It was on {iso_date}.", "(Date|Day): {iso_date}.", "That was {iso_date}.", "(Logged|Seen) on {iso_date}.", "It is dated {iso_date}.", "It happened on {iso_date}.", "The file is of {iso_date}.", "On {iso_date}, that is.", "The log of {iso_date} has it.",
            ),
            "time": (
                "The time was {clock}.", "It (happened|came|was) at {clock}.", "(Time|Clock): {clock}.", "(Logged|Seen) at {clock}.", "That was at {clock}.", "It began at {clock}.", "The clock said {clock}.", "It is stamped {clock}.", "At {clock}, that is.", "First seen {clock}.",
            ),
        },
    ),
    "address": (
        (
            "(Send it|Deliver|Bring it) to {street} {number} in {city}.",
            "The (street|address) is {number} {street}, {city}.",
            "(We live|We are|I live) at {number} {street} in {city}.",
            "The (street|road) is {street}. The (number|house) is {number}. The (city|town) is {city}.",
            "In {city}, go to {street} {number}.",
            "(It is|It's) {street}, (no.|number) {number}, in {city}.",
            "{City} is the (town|city). {Street} {number} is the address.",
            "The house is {number} {street}, {city}.",
            "(Please write to|Please note): {street} {number}, {city}.",
            "The new (flat|home|place) is in {city}, {street} {number}.",
            "Where is it? {City}, {number} {street}.",
            "(They|You) will find it in {city}: {street} {number}.",
            "The town is {city}, and the house is {street} {number}.",
        ),
        {
            "name": (
                "(It is|This is) for {name}.", "The (name|recipient|addressee) is {name}.", "{Name} (lives|works|waits) there.", "(Ask|Ring|Look) for {name}.", "(Attn|Attention|c/o) {name}.", "The door says {name}.", "(Give|Hand) it to {name}.", "{Name} will (sign|be home|take it).", "It belongs to {name}.", "{Name} has moved in.",
            ),
            "postcode": (
                "The (postcode|zip|zip code|postal code) is {postcode}.", "(Postcode|Zip): {postcode}.", "Its postcode: {postcode}.", "{Postcode} is the postcode.", "(Use|Write) {postcode} as postcode.", "The code of the town is {postcode}.", "Don't forget the zip {postcode}.", "With postcode {postcode}.", "The post knows it as {postcode}.", "Postal code {postcode}, please.",
            ),
            "country": (
                "The country is {country}.", "(It is|That is|This is) in {country}.", "{Country} is the country.", "Country: {country}.", "(Post|Mail) it to {country}.", "We are in {country}.", "It goes abroad, to {country}.", "(Yes|Right), in {country}.", "The stamp must do for {country}.", "{Country}, of course.",
            ),
        },
    ),
}  # fmt: skip

FRAGMENTS: dict[str, Phrases] = {
    "appointment": (
        (
            "{title}", "{Title}", "(appointment|meeting|event|entry): {title}", "{title} {date}", "(subject|topic) {title}", "{bare_date}: {title}", "what: {title}", "(new|next|planned): {title}", "(todo|reminder|note) {title}", "title={title}", "{title} ({bare_date})", "\"{title}\"",
        ),
        {
            "date": (
                "{bare_date}", "{date}", "day {bare_date}", "date: {bare_date}", "when: {bare_date}", "date={bare_date}", "({bare_date})", "planned {date}", "the day is {bare_date}", "due {date}",
            ),
            "time": (
                "{time}", "{bare_time}", "start {bare_time}", "time: {bare_time}", "from {bare_time}", "begins {time}", "time={bare_time}", "({bare_time})", "@ {bare_time}", "{bare_time} sharp", "starting {time}",
            ),
            "minutes": (
                "{minutes}", "duration {bare_minutes}", "{bare_minutes}", "length: {bare_minutes}", "takes {bare_minutes}", "lasts {bare_minutes}", "({bare_minutes})", "duration={bare_minutes}", "{bare_minutes} long", "max {bare_minutes}", "how long: {bare_minutes}",
            ),
            "place": (
                "{place}", "{bare_place}", "place: {bare_place}", "venue {bare_place}", "where: {bare_place}", "location={bare_place}", "@ {bare_place}", "({bare_place})", "meet {place}", "held {place}",
            ),
            "people": (
                "with {people}", "w/ {people}", "(guests|people): {people}", "who: {people}", "{people}", "{people} invited", "(attendees|participants) {people}", "people={people}", "({people})", "also: {people}", "{people} will come",
            ),
        },
    ),
    "order": (
        (
            "{items}", "{Items}", "order: {items}", "(goods|articles|items): {items}", "(send|ship|deliver) {items}", "(we need|needed|wanted): {items}", "items={items}", "new order {items}", "(pls|please) send {items}", "({items})", "order of {items}", "to pack: {items}",
        ),
        {
            "customer": (
                "{customer}", "for {customer}", "customer: {customer}", "(client|buyer) {customer}", "to {customer}", "customer={customer}", "({customer})", "ordered by {customer}", "bill to {customer}", "invoice: {customer}", "from {customer}",
            ),
            "due": (
                "{due}", "by {due}", "due {due}", "(deadline|latest): {due}", "no later than {due}", "due={due}", "({due})", "until {due}", "delivery {due_on}", "needed {due_on}", "{due} at the latest", "asap, not after {due}",
            ),
        },
    ),
    "contact": (
        (
            "{name}", "name: {name}", "(contact|person): {name}", "(call|ask|mail) {name}", "name={name}", "(new contact|new number): {name}", "({name})", "who: {name}", "I am {name}", "card of {name}", "Mr or Mrs {name}", "(talk to|see) {name}",
        ),
        {
            "company": (
                "{company}", "company: {company}", "(at|of|from|with) {company}", "firm {company}", "company={company}", "({company})", "works for {company}", "employer: {company}", "org: {company}", "on behalf of {company}",
            ),
            "email": (
                "{email}", "mail: {email}", "e-mail {email}", "<{email}>", "email={email}", "({email})", "write to {email}", "mailto:{email}", "M: {email}", "answers to {email}",
            ),
            "phone": (
                "{phone}", "phone: {phone}", "tel. {phone}", "mobile {phone}", "phone={phone}", "call {phone}", "T: {phone}", "number is {phone}", "tel:{phone}", "reachable at {phone}",
            ),
            "city": (
                "{city}", "city: {city}", "in {city}", "(town|office) {city}", "city={city}", "({city})", "from {city}", "based in {city}", "lives in {city}", "office: {city}",
            ),
        },
    ),
    "measurement": (
        (
            "{quantity} {reading}", "{reading} {quantity}", "{quantity}: {reading}", "{quantity}={reading}", "{quantity} is {reading}", "{Quantity} {reading}", "(measured|read): {quantity} {reading}", "{reading} ({quantity})", "{quantity} ({reading})", "{reading} of {quantity}", "{quantity} at {reading}", "value {reading} of {quantity}", "{quantity} around {reading}",
        ),
        {
            "sensor": (
                "{sensor}", "at {sensor}", "sensor: {sensor}", "(source|device) {sensor}", "sensor={sensor}", "({sensor})", "from {sensor}", "near {sensor}", "@ {sensor}", "sent by {sensor}", "on {sensor}",
            ),
            "date": (
                "{date}", "{bare_date}", "date: {bare_date}", "day {bare_date}", "date={bare_date}", "({bare_date})", "for {bare_date}", "taken {date}", "as of {bare_date}", "day: {bare_date}",
            ),
            "time": (
                "{time}", "{bare_time}", "time: {bare_time}", "taken {time}", "time={bare_time}", "({bare_time})", "@ {bare_time}", "as of {bare_time}", "clock {bare_time}", "read {time}",
            ),
        },
    ),
    "log": (
        (
            "{LEVEL} {service} {fault}", "{service} {fault} {level}", "{fault} ({level}, {service})", "{level}/{service}: {fault}", "\\[{LEVEL}\\] {service}: {fault}", "<{level}> {service}: {fault}", "{service}: {fault} \\[{level}\\]", "level={level} service={service} msg={fault}", "{LEVEL} by {service}: {fault}", "{level} raised by {service}: {fault}", "{level} {service}\\[{pid}\\]: {fault}", "{LEVEL}: \"{fault}\" from {service}", "{fault} reported by {service} as {level}", "(component|unit|daemon) {service} {LEVEL} {fault}",
        ),
        {
            "code": (
                "code {code}", "status {code}", "rc={code}", "exit {code}", "errno {code}", "({code})", "exit status {code}", "code: {code}", "#{code}", "\\[{code}\\]", "{code}", "return code {code}", "exit={code}",
            ),
            "date": (
                "{iso_date}", "on {iso_date}", "date={iso_date}", "date: {iso_date}", "({iso_date})", "\\[{iso_date}\\]", "day {iso_date}", "of {iso_date}", "d={iso_date}", "since {iso_date}",
            ),
            "time": (
                "{clock}", "at {clock}", "time={clock}", "time: {clock}", "({clock})", "\\[{clock}\\]", "@{clock}", "ts={clock}", "clock {clock}", "since {clock}",
            ),
        },
    ),
    "address": (
        (
            "{street} {number}, {city}", "{number} {street}, {city}", "{city}, {street} {number}", "{street} no. {number} in {city}", "street: {street} {number}, city: {city}", "{city}: {number} {street}", "{street}, house number {number}, {city}", "(send|ship|mail) to {number} {street}, {city}", "address: {street} {number}, {city}", "{number} {street} ({city})", "street={street} number={number} city={city}", "(home|office|shop): {street} {number}, {city}", "to {city}, {number} {street}",
        ),
        {
            "name": (
                "{name}", "for {name}", "name: {name}", "c/o {name}", "attn {name}", "attn: {name}", "name={name}", "({name})", "(recipient|addressee) {name}", "to {name}", "{name}'s place", "ring at {name}",
            ),
            "postcode": (
                "{postcode}", "postcode {postcode}", "zip: {postcode}", "zip {postcode}", "({postcode})", "postcode={postcode}", "postal code {postcode}", "zip code {postcode}", "zip no. {postcode}", "with postcode {postcode}",
            ),
            "country": (
                "{country}", "country: {country}", "in {country}", "({country})", "country={country}", "state {country}", "country is {country}", "to {country}", "nation: {country}", "all in {country}",
            ),
        },
    ),
}  # fmt: skip
